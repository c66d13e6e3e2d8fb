"""What happens around a model's calls: which graph serves which place, and whether it may."""
