"""What one server process keeps of its prompts: sessions started, graphs filed, runs told."""
