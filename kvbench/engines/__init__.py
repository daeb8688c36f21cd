"""Serving engines: the built-in one, and adapters to others."""
