"""Networks: the seam between them and PPO, those that dppo chooses, and modules of a user."""
