"""Spaces and actions as plain data. Every room may use them."""
