"""The logger of all modules, silent until a run or the user's own logging shows it."""

import logging

logger = logging.getLogger("dppo")
logger.addHandler(logging.NullHandler())
