"""DeepCache on the real host, beside a plain reference."""
