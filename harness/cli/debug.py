"""`qnnfarm debug`: what Genie does with the graphs of a container, on the emulator."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.arguments import Json
from harness.console import answers, print_json, print_text
from harness.errors import WrongUseError
from harness.exit_codes import BAD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from buildlib.speculative.kv_trace import Commit, GraphCall

app = typer.Typer(help="Diagnoses of what Genie does, on the emulator.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep `kv` a command of its own: typer drops the only name of a group."""


@app.command("kv")
def kv(
    container_dir: Annotated[Path, typer.Argument(help="Container for the emulator.")],
    prompt: Annotated[str, typer.Option(help="Prompt of the query.")] = "In the beginning",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 8,
    json: Json = False,
) -> None:
    """Show which row of which graph call Genie keeps in each column of its KV cache.

    The first part with caches is shown. After a call Genie adds columns: they are sound if they are
    rows of that call, from the first on, and each row saw those before it and no other.
    """
    from buildlib.container.container import GenAIContainer
    from buildlib.speculative.agreement import bound_lookahead, bound_turns
    from buildlib.speculative.kv_trace import find_commits, trace_dialog

    container = GenAIContainer.load(container_dir)
    config = bound_turns(container.genie_config, max_tokens)
    target = container.metadata.target
    if not target.emulator:
        reason = "calls are traced on the emulator alone"
        raise WrongUseError(f"{container_dir} is for {target.name}: {reason}")
    config = bound_lookahead(config, container.path, [prompt], max_tokens)
    text, calls = trace_dialog(container.path, config, prompt)
    commits = list(find_commits(calls, config))
    if json:
        print_json(
            {
                "text": text,
                "calls": [asdict(call) for call in calls],
                "commits": [
                    {"call": one.call.number, "columns": one.columns, "sound": one.is_sound}
                    for one in commits
                ],
            }
        )
    else:
        _show(text, calls, commits)
    if not all(one.is_sound for one in commits):
        raise typer.Exit(BAD)


def _show(text: str, calls: "Sequence[GraphCall]", commits: "Sequence[Commit]") -> None:
    console = answers()
    after = {one.call.number: one for one in commits}
    for call in calls:
        console.print(f"call {call.number}: engine {call.engine}, {call.graph}")
        if call.ids is not None:
            console.print(f"  ids        {' '.join(map(str, call.ids))}")
        shown = ("?" if place is None else str(place) for place in call.positions)
        console.print(f"  positions  {' '.join(shown)}")
        console.print(f"  cache      {_columns(call.columns)}")
        commit = after.get(call.number)
        if commit is not None:
            style = None if commit.is_sound else "red"
            verdict = "" if commit.is_sound else ": not its accepted rows"
            console.print(f"  added      {_columns(commit.columns)}{verdict}", style=style)
    print_text(text)


def _columns(columns: "Mapping[int, tuple[int, int] | None]") -> str:
    """Show columns as `column<-call.row`, with `?` for what no call gave."""
    shown = (
        f"{column}<-{'?' if origin is None else f'{origin[0]}.{origin[1]}'}"
        for column, origin in columns.items()
    )
    return " ".join(shown) or "empty"
