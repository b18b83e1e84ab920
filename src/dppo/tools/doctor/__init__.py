"""Find out what is wrong with an environment or a run, how fast it can be, and what to change."""
