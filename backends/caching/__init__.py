"""What caches over the steps of a sampler run have in common."""
