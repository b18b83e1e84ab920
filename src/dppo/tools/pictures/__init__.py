"""Pictures of runs. Matplotlib's object interface only: no global state, and no display is needed."""
