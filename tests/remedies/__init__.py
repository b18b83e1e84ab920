"""Remedies that messages print, and what carries each of them out: see `tests/test_remedies.py`."""
