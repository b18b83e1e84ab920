"""The contract of a user's network, and its check."""
