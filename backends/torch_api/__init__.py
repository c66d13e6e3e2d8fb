"""The only rooms that know PyTorch's private names."""
