"""The processes of a run. Only this package imports Ray, and only when a run uses Ray."""
