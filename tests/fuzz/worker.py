"""Runs cases one after the other: `python -m tests.fuzz.worker WORK SEED COMPILE_EVERY CASE...`.

A line `begin CASE` before each, and its verdict as JSON after it, so that whoever reads them knows
which case killed the process or keeps it busy.
"""

import resource
import sys
from pathlib import Path

from tests.fuzz.model import write_model
from tests.fuzz.outcome import run_case

_MEMORY_BYTES = 8 << 30
"""Of addresses: a file that makes its reader take more is a fault."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    work, seed, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    base = work / "base"
    if not base.exists():
        write_model(base)
    out = sys.stdout
    for case in map(int, sys.argv[4:]):
        out.write(f"begin {case}\n")
        out.flush()
        out.write(run_case(base, work / "case", seed, case, every).to_json() + "\n")
        out.flush()


if __name__ == "__main__":
    main()
