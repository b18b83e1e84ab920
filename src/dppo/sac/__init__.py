"""Soft actor-critic on the segments of samplers."""
