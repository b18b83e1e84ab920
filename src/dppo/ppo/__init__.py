"""PPO itself, in NumPy and torch. Uses no Ray, no files, no terminal and no clock."""
