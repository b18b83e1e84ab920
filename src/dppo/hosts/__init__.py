"""Parts of a process that steps environments: samplers, their threads, and the keeper beside an actor."""
