"""The server's side of a build: a queue, the workers, what is said between them."""
