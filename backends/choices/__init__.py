"""Chooses among several ways by timing on this card."""
