"""Transports, which run actors and bring questions to them."""
