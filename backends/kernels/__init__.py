"""Kernels and passes that compute otherwise than Inductor would."""
