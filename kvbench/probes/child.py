"""`python -m kvbench.probes.child`: one case as JSON on stdin, one JSON record per line on stdout."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from kvbench.core.errors import KvbenchError
from kvbench.probes import copy_case, file_case, prefill, remote_case, tier_case, tier_load

CASES: dict[str, Callable[[dict[str, Any], Callable[[dict[str, Any]], None]], None]] = {
    "tier-load": tier_load.measure,
    "copy": copy_case.measure,
    "file-io": file_case.measure,
    "remote": remote_case.measure,
    "tier-alone": tier_case.measure_alone,
    "tier-policy": tier_case.measure_policy,
    "prefill": prefill.measure,
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
        name = case.pop("case")
        CASES[name](case, emit)
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
