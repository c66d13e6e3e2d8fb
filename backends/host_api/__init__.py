"""What the host is asked, by its own names."""
