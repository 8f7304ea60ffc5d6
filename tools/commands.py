"""`docs/commands.md`, the table of all commands, and that of all metrics in `docs/measurements.md`.

python -m tools.commands
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.cli.app import load_command, panels
from harness.results.metrics import METRICS, Use

MEASUREMENTS = Path(__file__).parents[1] / "docs" / "measurements.md"
_METRICS_TABLE = re.compile(r"(?<=\| --- \| --- \| --- \| --- \|\n)(?:\| `\w+` \| .*\|\n)+")
_JUDGES = {Use.COMPARED: "compare", Use.GATED: "gate", Use.JUDGED: "history"}
PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
_HEAD = """# Commands

From the commands' own help, by `python -m tools.commands`. `-h` after a command lists its options.
[Exit codes](exit-codes.md) follow one rule. `--json` makes a command answer with JSON on stdout;
an error is one line on stderr that says what is wrong, where, and what to do.
"""


def page() -> str:
    """Return the page as it should be."""
    parts = [_HEAD]
    for panel, names in panels().items():
        parts.append(f"\n## {panel}\n\n| command | purpose | example |\n| --- | --- | --- |\n")
        parts += [row for name in names for row in _rows(load_command(name), name)]
    return "".join(parts)


def _rows(command: Any, name: str) -> Iterator[str]:  # noqa: ANN401 - typer exports no type for it
    for below, child in getattr(command, "commands", {}).items():
        yield from _rows(child, f"{name} {below}")
    if not hasattr(command, "commands"):
        text = inspect.cleandoc(command.help)
        purpose = " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")
        example = "".join(re.findall(r"^Example: (.+)$", text, re.MULTILINE))
        yield f"| `qnnfarm {name}` | {purpose} | `{example}` |\n"


def measurements() -> str:
    """Return `docs/measurements.md` with the metrics as they are declared."""
    rows = (
        f"| `{m.key}` | {m.unit} | {', '.join(w for r, w in _JUDGES.items() if r in m.use)} "
        f"| {m.about} |\n".replace("|  |", "| |")
        for m in METRICS.values()
    )
    text = MEASUREMENTS.read_text(encoding="utf-8")
    return _METRICS_TABLE.sub("".join(rows).replace("\\", "\\\\"), text, count=1)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    MEASUREMENTS.write_text(measurements(), encoding="utf-8")
