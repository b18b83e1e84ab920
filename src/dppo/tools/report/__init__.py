"""A run as a page of HTML: `dppo report`."""
