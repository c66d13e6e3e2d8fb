"""How a model is cut: forms, places, dispatch, and regions as data."""
