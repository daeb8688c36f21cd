"""Serving engines behind one small protocol: started, reset, asked for settings and counters."""
