"""One run: the parts that it is built of, the loop, reports, checkpoints, stopping."""
