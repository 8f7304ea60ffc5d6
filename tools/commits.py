"""What CONTRIBUTING.md asks of commits: `python -m tools.commits BASE` checks those after BASE.

Each commit says why in its body. Where product files change, so does CHANGELOG.md, or a commit
says `Changelog: none` with the reason.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_PRODUCT = ("buildlib/", "device_scripts/", "harness/", "plugins/", "reports/", "suites/")
_EXCUSE = re.compile(r"^Changelog: none\W+\w", re.MULTILINE)
_TRAILER = re.compile(r"[A-Z][\w-]+: ")


def faults(base: str, folder: Path) -> list[str]:
    """Return what the commits after `base` lack, a line each."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words],  # noqa: S607 - of the user's path
            cwd=folder, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout

    lacking, excused = [], False
    for commit in git("rev-list", "--no-merges", f"{base}..HEAD").split():
        subject, _, body = git("show", "-s", "--format=%B", commit).strip().partition("\n")
        excused |= bool(_EXCUSE.search(body))
        if not any(line and not _TRAILER.match(line) for line in body.splitlines()):
            lacking.append(f"{commit[:9]} {subject}: its body does not say why")
    files = git("diff", "--name-only", f"{base}...HEAD").splitlines()
    product = [file for file in files if file.startswith(_PRODUCT)]
    if product and "CHANGELOG.md" not in files and not excused:
        lacking.append(
            f"{product[0]} changes and CHANGELOG.md does not: add a line for users, or "
            "`Changelog: none (REASON)` to a commit's body"
        )
    return lacking


def main(arguments: Sequence[str]) -> int:
    """Print what is lacking; 1 where something is."""
    if len(arguments) != 1:
        print("usage: python -m tools.commits BASE", file=sys.stderr)
        return 2
    lacking = faults(arguments[0], Path.cwd())
    print("\n".join(lacking or ["the commits say what they are asked for"]))
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
