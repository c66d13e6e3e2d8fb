"""What development needs and users do not: set-up, servers, small checkpoints, the demo."""
