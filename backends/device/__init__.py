"""The one seam to devices: their sorts, what each can do, and what is asked of PyTorch."""
