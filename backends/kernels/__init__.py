"""Kernels that graphs call by measurement: attention, products; some are our own."""
