"""Parts of a process that steps environments: samplers, their threads, and the keeper of an actor."""
