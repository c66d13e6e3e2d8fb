"""A region as plain data: what it consists of, which code it runs, its key."""
