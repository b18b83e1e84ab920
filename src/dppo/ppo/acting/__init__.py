"""The acting half of PPO: samplers and agents make segments, in NumPy."""
