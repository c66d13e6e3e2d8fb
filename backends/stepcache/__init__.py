"""Step Cache: some steps of a sampler run are forecast from those before."""
