"""Play recorded episodes again: `dppo replay`."""
