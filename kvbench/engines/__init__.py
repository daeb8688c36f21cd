"""Engines that serve a model: the built-in one, and adapters that start and drive others."""
