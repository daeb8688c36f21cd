"""The built-in engine: a small real transformer with real tiers behind an OpenAI-compatible server."""
