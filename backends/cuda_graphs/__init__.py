"""Whole calls of a model captured as CUDA graphs, and replayed."""
