"""The world. Knows Gymnasium and NumPy; nothing of PPO, and nothing of where it runs."""
