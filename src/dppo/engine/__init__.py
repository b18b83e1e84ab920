"""Collecting segments from actors, and recovering from lost actors."""
