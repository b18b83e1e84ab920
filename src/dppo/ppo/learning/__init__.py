"""The learning half of PPO: batches, advantages, losses, SGD."""
