"""Expected failures: what happened, with which value, what to do next, in one line."""


class KvbenchError(Exception):
    """An expected failure; `main()` prints the message on one line and exits with `exit_code`."""

    exit_code = 1


class UsageError(KvbenchError):
    """A wrong value on the command line or in a file a person wrote."""

    exit_code = 2


class LayoutError(UsageError):
    """A model cannot be laid out or stored this way; a sweep skips the combination and goes on."""


class MissingDependencyError(KvbenchError):
    """An optional package is not installed; the message carries the install command."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed; run: pip install 'kvbench[{extra}]'")
