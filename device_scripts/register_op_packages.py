#!/usr/bin/env python3
"""Registers op packages with QNN, and then runs another runner in the same process.

Genie takes no op packages. It loads a binary that has operations of one if the package is
registered on any handle of the backend in its process, as long as that handle is open (seen with
Genie 1.21 on QNN 2.51). Standard library only, Python 3.8+. Exit status: that of the runner, 1 if
QNN refuses a package, 2 for wrong use.
"""

import argparse
import runpy
import sys
from pathlib import Path
from typing import List, NoReturn, Optional, Sequence, Tuple

from buildlib.toolchains.qnn import api, refusal

OpPackage = Tuple[str, str, str]
_open: List[api.HtpBackend] = []
"""Backends whose packages serve the runner; they end with the process."""


def op_package(text: str) -> OpPackage:
    """Read PATH:PROVIDER or PATH:PROVIDER:TARGET.

    Raises:
        ValueError: it is something else.
    """
    path, provider, *targets = text.split(":")
    if not path or not provider or len(targets) > 1 or not all(targets):
        raise ValueError(text)
    return path, provider, targets[0] if targets else "CPU"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    build = argparse.ArgumentParser(
        prog="register_op_packages.py", allow_abbrev=False, description=__doc__
    )
    build.add_argument(
        "--op-package",
        metavar="PATH:PROVIDER[:TARGET]",
        type=op_package,
        action="append",
        required=True,
        help="op package to register; several in their order",
    )
    build.add_argument("runner", metavar="RUNNER.py", help="the runner")
    build.add_argument("arguments", nargs=argparse.REMAINDER, help="its options")
    return build


def register(packages: Sequence[OpPackage]) -> None:
    """Register packages in their order on a backend that stays open.

    Raises:
        refusal.RefusedError: the library does not load, or refuses one.
    """
    backend = api.HtpBackend(Path("libQnnHtp.so"), whole=False)
    _open.append(backend)
    path = target = ""
    try:
        for path, provider, target in packages:
            backend.register_op_package(path, provider, target)
    except refusal.RefusedError as error:
        raise refusal.RefusedError(f"op package {path} for {target}: {error}") from error


def main(arguments: Optional[Sequence[str]] = None) -> NoReturn:
    """Register, and become the runner."""
    options = parser().parse_args(arguments)
    try:
        register(options.op_package)
    except refusal.RefusedError as error:
        print(f"register_op_packages.py: error: {error}", file=sys.stderr)
        sys.exit(1)
    sys.argv = [options.runner, *options.arguments]
    runpy.run_path(options.runner, run_name="__main__")
    sys.exit(0)


if __name__ == "__main__":
    main()
