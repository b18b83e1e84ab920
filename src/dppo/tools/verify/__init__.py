"""Check that a run is what its settings lead to: `dppo verify`."""
