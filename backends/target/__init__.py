"""What compiled code depends on besides its kind, and its key."""
