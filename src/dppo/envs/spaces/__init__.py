"""Gymnasium's spaces as plain data, and observations as elements of a NumPy dtype."""
