"""`docs/commands.md`, and the tables of metrics and of options without an effect in other pages.

python -m tools.commands
"""

import inspect
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from buildlib.builder.build_options import no_effects
from buildlib.container.genie_config import GenieConfig
from buildlib.validation import NoEffect, without_effect
from harness.cli.app import load_command, panels
from harness.plans.plan_file import Plan
from harness.results.metrics import METRICS, Use

MEASUREMENTS = Path(__file__).parents[1] / "docs" / "measurements.md"
_METRICS_TABLE = re.compile(r"(?<=\| --- \| --- \| --- \| --- \|\n)(?:\| `\w+` \| .*\|\n)+")
BUILDER = Path(__file__).parents[1] / "docs" / "builder.md"
_SILENT_TABLE = re.compile(
    r"(?<=\| where \| key \| because \|\n\| --- \| --- \| --- \|\n)(?:\| .*\|\n)+"
)
_OF_PYPI = " (`--toolchain pypi`)"
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


def builder() -> str:
    """Return `docs/builder.md` with the keys that are read, and change nothing."""
    kinds: dict[str, Iterable[tuple[str, NoEffect]]] = {
        "build": no_effects().items(),
        **_of_recipes(),
        "plan": without_effect(Plan),
        "Genie": without_effect(GenieConfig),
    }
    rows = (
        f"| {where} | `{key}` | {note.reason}{_OF_PYPI if note.toolchain else ''} |\n"
        for where, notes in kinds.items()
        for key, note in notes
    )
    text = BUILDER.read_text(encoding="utf-8")
    return _SILENT_TABLE.sub("".join(rows).replace("\\", "\\\\"), text, count=1)


def _of_recipes() -> dict[str, Iterable[tuple[str, NoEffect]]]:
    """Return those of recipes, whose plugin the checkout may be without."""
    if find_spec("plugins.pipeline") is None:
        return {}
    from plugins.pipeline.registry import BUILT_IN, StageRegistry
    from plugins.pipeline.settings import PipelineSettings

    stages = StageRegistry().stages()
    own = {f"`stages.{name}`": without_effect(stages[name].Config) for name in BUILT_IN}
    return {"recipe": without_effect(PipelineSettings), **own}


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    MEASUREMENTS.write_text(measurements(), encoding="utf-8")
    BUILDER.write_text(builder(), encoding="utf-8")
