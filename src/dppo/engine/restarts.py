"""Delays before lost processes are replaced."""

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0


def delay_before(replacement: int) -> float:
    """Return the seconds to wait before the 1st, 2nd ... replacement of a process in a row: 0, 1, 2, 4 ... 30."""
    if replacement == 1:
        return 0.0
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (replacement - 2))
