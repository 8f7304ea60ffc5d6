"""Programs of the host that a pool runs: a user's commands."""

import subprocess
from collections.abc import Sequence

from harness.errors import PoolError, one_line

_MOST_OUTPUT = 1 << 20


def run_program(words: Sequence[str], timeout_s: float, stdin: bytes = b"") -> str:
    """Run a program without a shell.

    Returns:
        The first MiB of its stdout and stderr.

    Raises:
        PoolError: it cannot be run, ended with a status other than 0, or took too long.
    """
    program = one_line(words[0], 80)
    try:
        process = subprocess.run(
            list(words),
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PoolError(f"{program} took longer than {timeout_s:g} s") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PoolError(f"{program} cannot be run: {reason}") from None
    if process.returncode:
        output = one_line(process.stdout[-2000:].decode("utf-8", "replace")) or "(silent)"
        raise PoolError(f"{program} ended with status {process.returncode}: {output}")
    return process.stdout[:_MOST_OUTPUT].decode("utf-8", "replace")
