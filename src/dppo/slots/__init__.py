"""Cores, ranks and nodes of an environment: what a factory gets for its parameter `slots`."""
