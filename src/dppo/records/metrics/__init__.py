"""The metrics of a run: rows, files, and what limited the speed."""
