"""The algorithm. Knows NumPy and torch; no Ray, no files, no terminal, no clock."""
