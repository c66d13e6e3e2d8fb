"""Every name of the host that is not meant for others, and small functions that ask for it."""
