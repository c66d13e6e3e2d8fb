"""Benchmarks on a GPU: ours, the host's eager code and `torch.compile`, in the host's sampling."""
