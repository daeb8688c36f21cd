"""`python -m kvbench.probes.child`: one case as JSON on stdin, one JSON record per line on stdout."""

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from kvbench.core.errors import KvbenchError

CASES = {
    "tier-load": "kvbench.probes.tier_load:measure",
    "copy": "kvbench.probes.copy_case:measure",
    "file-io": "kvbench.probes.file_case:measure",
    "remote": "kvbench.probes.remote_case:measure",
    "tier-alone": "kvbench.probes.tier_alone_case:measure",
    "tier-policy": "kvbench.probes.tier_policy_case:measure",
    "prefill": "kvbench.probes.prefill:measure",
}


def main() -> int:
    """Runs the case; the last line of stderr says why when it could not."""
    # Libraries print where they like; only records may reach the pipe that the parent reads.
    records = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(record: dict[str, Any]) -> None:
        records.write(json.dumps(record, allow_nan=False) + "\n")
        records.flush()

    try:
        case = json.load(sys.stdin)
        module, _, function = CASES[case.pop("case")].partition(":")
        measure: Callable[[dict[str, Any], Callable[[dict[str, Any]], None]], None]
        measure = getattr(import_module(module), function)
        measure(case, emit)
    except KvbenchError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except MemoryError:
        sys.stderr.write("out of memory\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "") + "\n")
        return 1
    emit({"record": "done"})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
