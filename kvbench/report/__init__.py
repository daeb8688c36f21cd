"""Turns a saved result into a terminal table or an HTML page, and knows nothing else."""
