"""The rows of a sampler: environments that step one by one, a vector environment, or the agents of one game."""
