"""The exit codes of every command; docs/results.md tells users about them."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What a command returns to the shell."""

    OK = 0
    FAILED = 1
    """An expected failure, or interrupted."""
    USAGE = 2
    FOUND_PROBLEM = 3
    """It ran, and found what it looks for: a divergence, a failed lint, a regression."""
    INSUFFICIENT = 4
    """It ran, and the input cannot answer the question; the output says what to capture."""
