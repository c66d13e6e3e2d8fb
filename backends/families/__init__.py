"""How host models are cut into regions; one module per model family."""
