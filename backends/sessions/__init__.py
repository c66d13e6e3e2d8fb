"""What one server process keeps of its prompts, and reports of them."""
