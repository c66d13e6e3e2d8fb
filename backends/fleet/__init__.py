"""What machines share: a store anywhere, who builds what there, and keys that only verify."""
