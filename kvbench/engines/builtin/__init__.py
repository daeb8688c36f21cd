"""The built-in engine: a real transformer with its KV in real tiers, behind an OpenAI-compatible server."""
