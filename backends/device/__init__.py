"""The one seam to devices: what sorts there are, what each can do, and what is asked of PyTorch."""
