"""The load generator: worker processes with event loops of their own and one time anchor."""
