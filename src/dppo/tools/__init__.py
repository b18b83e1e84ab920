"""Tools that look at runs from the outside. The core finds them by entry points, and imports none of them."""
