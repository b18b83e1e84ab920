"""The commands of `dppo`, one module per command."""
