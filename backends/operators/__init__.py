"""What graphs call by name when they run."""
