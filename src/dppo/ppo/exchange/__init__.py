"""Everything that crosses a border between learner, actors and ranks: frozen records, and what they are made of."""
