"""Compile ControlNet with a plain ControlNet of the host."""
