"""What happens while a model runs: which graph serves which place, and with which weights."""
