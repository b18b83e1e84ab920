"""What a run leaves behind: checkpoints, metrics, lines on the terminal, pictures. No Ray, no torch."""
