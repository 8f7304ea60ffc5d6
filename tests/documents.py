"""README and docs as their readers meet them: blocks, commands, and what commands print."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(path for path in ROOT.glob("plugins/*/*.md") if path.name != "README.md"),
)
_BLOCK = re.compile(
    r"(?ms)^(?:<!-- (?P<mark>not run|needs): (?P<why>[^\n]+?) -->\n)?"
    r"```(?P<kind>\w*)\n(?P<text>.*?)^```"
)
_REST = "..."
_STATUS = "\0"
_NORMAL = (
    (re.compile(r"\b[0-9a-f]{10,64}\b"), "HASH"),
    (re.compile(r"[-+±]? *\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?: [kMG]i?B\b| B\b)?"), "0"),
    (re.compile(r"\s+"), " "),
)
"""What differs from run to run and from machine to machine, and what stands for it."""


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        why: the reason why it is not run, from a comment before it.
        needs: a condition of `tests.system` without which it is not run.
    """

    path: Path
    line: int
    kind: str
    text: str
    why: str | None
    needs: str | None

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a block, its lines as one, and the output that the document shows for it.

    Attributes:
        text: empty where the output is that of the last command of the block before.
        shown: None where the document shows nothing.
    """

    text: str
    shown: str | None


def blocks(*kinds: str) -> list[Block]:
    """Return the blocks of these kinds of all documents."""
    found = []
    for path in DOCUMENTS:
        document = path.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(document):
            if match["kind"] in kinds:
                line = document.count("\n", 0, match.start("kind")) + 1
                marks = [match["why"] if match["mark"] == m else None for m in ("not run", "needs")]
                found.append(Block(path, line, match["kind"], match["text"], *marks))
    return found


def commands(block: Block) -> Iterator[Command]:
    """Yield the commands of a block of kind `sh`, or `console`, which has them behind `$`."""
    text = block.text.replace("\\\n", "")
    match block.kind:
        case "sh":
            for line in text.splitlines():
                if line and not line.startswith("#"):
                    yield Command(line, None)
        case "console":
            first, *others = re.split(r"(?m)^\$ ", text)
            if first:
                yield Command("", first)
            for command, _, shown in (part.partition("\n") for part in others):
                yield Command(command, shown)


class Shell:
    """A shell that runs one command after the other, as a reader types them."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash", "-O", "expand_aliases"], cwd=folder, env=variables, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def run(self, command: str) -> tuple[int, str]:
        """Run a command; return its exit status and what it prints on both streams."""
        given, printed = self._process.stdin, self._process.stdout
        assert given is not None
        assert printed is not None
        given.write(f"{{ {command}\n}} </dev/null; printf '\\n\\0%d\\n' $?\n")
        output = ""
        for line in printed:
            if line.startswith(_STATUS):
                return int(line[1:]), output[:-1]
            output += line
        raise AssertionError(f"the shell ended in `{command}`: {output}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        self._process.communicate()


def difference(shown: str, printed: str) -> str:
    """Compare what a document shows with what a command prints: empty if they agree.

    Numbers and widths of columns may differ. `...` stands for any lines, or for a part of one.
    """
    wanted, found = _normal(shown), _normal(printed)
    pattern = "".join(
        r"(?:.*\n)*?" if line == _REST else re.escape(line).replace(r"\.\.\.", ".*") + "\n"
        for line in wanted
    )
    if re.fullmatch(pattern, "".join(f"{line}\n" for line in found)):
        return ""
    return "\n".join(unified_diff(wanted, found, "shown", "printed", lineterm="", n=999))


def _normal(text: str) -> list[str]:
    lines = []
    for line in text.splitlines():
        # Where there are no namespaces, a device says so, and a slow machine that it still runs.
        if " is unconfined: " in line or "still running, " in line:
            continue
        for pattern, stands in _NORMAL:
            line = pattern.sub(stands, line)  # noqa: PLW2901
        lines.append(line.strip())
    return list(filter(None, lines))
