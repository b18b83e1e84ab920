"""Trained policies: load them, act and play with them. No torch, no Ray."""
