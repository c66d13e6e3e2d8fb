"""Two small transformers that make images by flow matching: digits, and emoji in colour."""
