"""Ways to move blocks between a file and memory: one module each, chosen by name in `registry.py`."""
