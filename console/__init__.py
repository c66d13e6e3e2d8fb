"""The commands of `cli.py`, a module each; they use `backends/` and nothing else of the pack."""
