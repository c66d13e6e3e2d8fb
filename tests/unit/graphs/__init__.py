"""Graphs of a process, over a store and a folder, with a builder that answers at once."""
