"""Graph files: one schema, signed, found, linked beside workflows and evicted."""
