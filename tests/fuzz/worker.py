"""Runs cases one after the other: `python -m tests.fuzz.worker WORK SEED COMPILE_EVERY [CASE...]`.

Without cases, it takes them from its input, a line each. It prints the verdict on each as JSON.
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
    for case in map(int, sys.argv[4:] or sys.stdin):
        verdict = run_case(base, work / "case", seed, case, every)
        sys.stdout.write(verdict.to_json() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
