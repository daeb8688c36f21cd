"""Modules that an engine loads, not kvbench: this folder goes on the engine's PYTHONPATH."""
