"""Ways to copy segments between two pools of memory: one module per kind, chosen by name in `registry.py`."""
