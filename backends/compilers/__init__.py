"""The compilers: each turns a region's exported program into a payload and back."""
