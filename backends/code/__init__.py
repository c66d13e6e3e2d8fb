"""Whose code runs: what a kind depends on, what packs replaced."""
