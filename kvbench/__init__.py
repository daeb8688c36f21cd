"""Benchmarks and diagnostics for multi-tier KV caches."""

__version__ = "0.1.0"
