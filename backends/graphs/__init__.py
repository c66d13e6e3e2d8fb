"""The graphs of this process."""
