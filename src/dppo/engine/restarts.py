"""Delays before lost processes are replaced, and the lines about them."""

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0


def delay_before(replacement: int) -> float:
    """Return the seconds to wait before the 1st, 2nd ... replacement of a process in a row: 0, 1, 2, 4 ... 30."""
    if replacement == 1:
        return 0.0
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (replacement - 2))


def describe_loss(message: str, delay_s: float) -> str:
    """Add to the first line of a message about a lost process that it is replaced, after a delay."""
    replaced = f"replaced in {delay_s:.0f} s" if delay_s else "replaced"
    first_line, *details = message.split("\n")
    return "\n".join([f"{first_line}; {replaced}", *details]).rstrip()
