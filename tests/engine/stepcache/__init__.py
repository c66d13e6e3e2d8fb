"""Step Cache on small models of the host."""
