"""The shared layer: regions of host models, their compiled graphs, and the files of those."""
