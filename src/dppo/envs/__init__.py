"""Environments, with Gymnasium and NumPy. Knows nothing of the algorithm, nor of where it runs."""
