"""The backends: each turns a region's exported program into a payload and back."""
