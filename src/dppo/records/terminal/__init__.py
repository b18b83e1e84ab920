"""The run on a terminal: first lines, plain lines, panel."""
