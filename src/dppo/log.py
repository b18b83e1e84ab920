"""The logger of all modules."""

import logging

logger = logging.getLogger("dppo")
