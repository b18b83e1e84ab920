"""The records of a run: checkpoints, metrics, terminal output, pictures. No Ray, no torch."""
