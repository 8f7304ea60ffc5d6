"""Which row of which graph call Genie keeps in each column of its KV cache.

    python -m tools.kv_trace CONTAINER_DIR --max-tokens 8

on a container for the emulator; exits 1 if columns are not the accepted rows of their call. Genie
copies rows of a call's outputs into the columns of its caches, and a mask opens those that the next
call may see. Keys of the last layer of the first part with caches tell the columns apart: they
depend on all tokens before.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_config import GenieConfig
from buildlib.speculative.agreement import bound_lookahead, bound_turns, dialog_limit_s
from buildlib.toolchains.ort_qnn.wheel import find_libraries

_ROOT = Path(__file__).resolve().parents[1]
_CLOSED = (-1, -1)


@dataclass(frozen=True, slots=True)
class GraphCall:
    """A call of a graph with caches.

    Attributes:
        engine: number of the context that the graph is in, in the order of their first graphs.
        ids: tokens of its rows; None where the host looked them up.
        positions: of its rows, by the cosines and sines that they are turned by; None for those
            that no position fits.
        sees: rows of the same call that each row sees.
        drafts: whether it is of a draft head, which keeps branches of its tree while it drafts.
        columns: the open columns of the cache, each with the call and the row that it comes from;
            None for those that no call gave, as a prefix from a file.
    """

    number: int
    engine: int
    graph: str
    ids: tuple[int, ...] | None
    positions: tuple[int | None, ...]
    sees: tuple[tuple[int, ...], ...]
    drafts: bool
    columns: Mapping[int, tuple[int, int] | None]


@dataclass(frozen=True, slots=True)
class Commit:
    """Columns that Genie added to the cache after a call.

    Attributes:
        call: after which they were added.
        columns: by their number; where each comes from.
        is_sound: whether they are the call's own rows, from the first on, and each of them saw
            those before it and no other.
    """

    call: GraphCall
    columns: Mapping[int, tuple[int, int] | None]
    is_sound: bool


def trace_dialog(
    folder: Path, config: GenieConfig, prompt: str
) -> tuple[str, tuple[GraphCall, ...]]:
    """Run a dialog on the emulator; return its answer and the calls of graphs with caches.

    Args:
        folder: with all files that the configuration names, for the emulator.

    Raises:
        subprocess.CalledProcessError: Genie crashed or failed; its log is on stderr.
    """
    request = {"folder": str(folder), "dialogs": [config.to_json()], "prompts": [prompt]}
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch, "answer.json")
        subprocess.run(
            [sys.executable, "-m", "tools.kv_tracer", "trace", str(place)],
            check=True,
            cwd=_ROOT,
            env=os.environ | {"LD_LIBRARY_PATH": find_libraries().search_path},
            input=json.dumps(request).encode(),
            stdout=sys.stderr,
            timeout=dialog_limit_s(folder, config, 1),
        )
        answer = json.loads(place.read_bytes())["ok"]
    calls = TypeAdapter(tuple[GraphCall, ...]).validate_python(answer["calls"])
    return answer["answers"][0][0], calls


def find_commits(calls: Sequence[GraphCall], config: GenieConfig) -> Iterator[Commit]:
    """Yield the columns that Genie added to the cache of each engine after each of its calls.

    Caches of draft heads are left out, and columns of a forecast prefix, which come from a file.
    """
    ssd = config.dialog.ssd
    prefix = 0 if ssd is None else ssd.forecast_prefix
    last: dict[int, GraphCall] = {}
    for call in calls:
        before = last.get(call.engine)
        last[call.engine] = call
        if before is None or call.drafts:
            continue
        new = {
            column: origin
            for column, origin in call.columns.items()
            if column >= prefix and before.columns.get(column, _CLOSED) != origin
        }
        rows = [origin[1] for origin in new.values() if origin and origin[0] == before.number]
        sound = len(rows) == len(new) and rows[:1] == [0][: len(rows)]
        sound = sound and all(
            before.sees[row] == tuple(rows[: index + 1]) for index, row in enumerate(rows)
        )
        yield Commit(before, new, sound)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each call of graphs with the columns that Genie added after it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("container", type=Path)
    parser.add_argument("--prompt", default="In the beginning")
    parser.add_argument("--max-tokens", type=int, default=8)
    given = parser.parse_args(arguments)
    container = GenAIContainer.load(given.container)
    if not container.metadata.target.emulator:
        parser.error(
            f"{given.container} is for {container.metadata.target.name}: name one for the emulator"
        )
    config = bound_turns(container.genie_config, given.max_tokens)
    config = bound_lookahead(config, container.path, [given.prompt], given.max_tokens)
    text, calls = trace_dialog(container.path, config, given.prompt)
    commits = {one.call.number: one for one in find_commits(calls, config)}
    for call in calls:
        print(f"call {call.number}: engine {call.engine}, {call.graph}")
        if call.ids is not None:
            print(f"  ids        {' '.join(map(str, call.ids))}")
        print(f"  positions  {' '.join('?' if n is None else str(n) for n in call.positions)}")
        print(f"  cache      {_columns(call.columns)}")
        if commit := commits.get(call.number):
            verdict = "" if commit.is_sound else ": not its accepted rows"
            print(f"  added      {_columns(commit.columns)}{verdict}")
    print(text)
    return 0 if all(one.is_sound for one in commits.values()) else 1


def _columns(columns: Mapping[int, tuple[int, int] | None]) -> str:
    """Show columns as `column<-call.row`, with `?` for a column that no call gave."""
    cells = (
        f"{column}<-{'?' if origin is None else f'{origin[0]}.{origin[1]}'}"
        for column, origin in columns.items()
    )
    return " ".join(cells) or "empty"


if __name__ == "__main__":
    sys.exit(main())
