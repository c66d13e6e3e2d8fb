"""The graphs of this process: one, all of them, written down."""
