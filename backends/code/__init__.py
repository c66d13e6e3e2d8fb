"""Whose code runs: what a kind hangs on, what packs replaced."""
