"""What compiled code hangs on besides its kind, and its key."""
