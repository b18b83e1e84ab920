"""Collecting segments: which actor makes which, and what happens when one fails."""
