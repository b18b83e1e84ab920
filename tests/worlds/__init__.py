"""Environments and users' modules for tests. Actors import them by name: `worlds.acting:Masked`."""
