"""The files of a run that survive a crash: folder, lock, checkpoints."""
