"""A directory as a tier: one file of equal slots, each with a checked header, on any of the file engines."""
