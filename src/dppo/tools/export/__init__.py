"""Write trained policies for other programs: `dppo export`."""
