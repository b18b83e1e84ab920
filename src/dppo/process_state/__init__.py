"""Code of users runs in dppo's processes: what it changes there is taken back for dppo, and given back to it."""
