"""Models that no family describes: how their blocks are called, learned from one step."""
