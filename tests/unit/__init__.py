"""Tests of single modules; `saved` makes whole graph files for them."""
