"""The display of a run: a live panel on a terminal, plain lines elsewhere, or nothing."""
