"""The shared layer: regions of host models, graphs compiled for them, and the files they live
in.
"""
