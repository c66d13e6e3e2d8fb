"""Families that nobody described: how their blocks are called, learned from one step."""
