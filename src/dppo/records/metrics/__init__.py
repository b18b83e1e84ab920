"""The metrics of a run: its rows, and the files that they are in."""
