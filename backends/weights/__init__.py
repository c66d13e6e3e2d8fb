"""A model's live weights as graphs take them, wherever the host keeps them."""
