"""What runs in a worker process: from a job to a compiled graph."""
