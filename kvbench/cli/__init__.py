"""Command-line entry points: options in, one call to the package that does the work, `emit` out."""
