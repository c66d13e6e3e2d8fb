"""Diffusion transformers through Compile Model, one small one of each family."""
