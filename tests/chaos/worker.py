"""Runs cases one after the other: `python -m tests.chaos.worker WORK SEED [CASE...]`.

Without cases, it takes them from its input, a line each. It prints the verdict on each as JSON.
`WORK` holds all that the cases touch.
"""

import argparse
import sys
from pathlib import Path

from tests.chaos.judging import run_case
from tests.chaos.lab import opened


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.worker", description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("cases", type=int, nargs="*")
    parser.add_argument("--build-cache", type=Path, default=None)
    options = parser.parse_args()
    work = options.work.absolute()
    with opened(work, options.build_cache or work / "build-cache") as lab:
        for case in options.cases or map(int, sys.stdin):
            sys.stdout.write(run_case(lab, options.seed, case).to_json() + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
