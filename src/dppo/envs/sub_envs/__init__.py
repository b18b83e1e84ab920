"""The environments of a sampler: each on its own, those of a vector environment, or the agents of one game."""
