"""Cells of a plan through the real scheduler, runner, journal and store.

In the scene `run` cells are plain commands, in `genie` a container answers queries.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from harness.plans.cell_runner import DeviceCellRunner, ModelCache, PlanSettings
from harness.plans.cells import Cell, make_cell
from harness.plans.journal import Journal
from harness.plans.outcome import Summary
from harness.plans.plan_file import Retries
from harness.plans.scheduler import MatrixOptions, run_matrix
from harness.pool.pool import Pool
from harness.pool.requirement import Requirement
from harness.results.records import Run
from harness.results.store import ResultsStore, RunFilter
from harness.workloads.bench import Bench
from harness.workloads.command import Command
from harness.workloads.generate import Generate
from tests.chaos.actors import Actor, Tell, conduct
from tests.chaos.drawing import TOKEN, Case
from tests.chaos.ends import End, end_of
from tests.chaos.lab import Farm, Lab, patient

if TYPE_CHECKING:
    from harness.workloads.registry import AnyWorkload

_LEASE_S = 20.0
_CELL_S = 8.0
_GENIE_CELL_S = 40.0
_RUNNER_S = 15.0
_TOKENS = 6
_EACH = ("prefill_tokens_per_s", "decode_tokens_per_s")
"""What every repetition measures; of a peak a very busy device may know nothing."""
_PROMPTS = ("In the beginning", "And the earth was without form")
_SLEEP = "import sys, time; time.sleep(0.4); print(sys.argv[1])"
_DAEMON = 'setsid sleep 600 </dev/null >/dev/null 2>&1 & echo "$0"'
_STUBBORN = "trap '' HUP INT TERM; sleep 0.3; echo \"$0\""
_NOISY = 'head -c 300000 /dev/zero | tr "\\0" x; echo; echo "$0"'
_HEAT = 'i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; echo "$0"'


def cells_of(lab: Lab, case: Case) -> list[Cell]:
    """The cells of a case; all that they print or generate is known before."""
    chance = case.chance("cells")
    genie = case.scene == "genie"
    cells: list[Cell] = []
    for number in range(chance.randint(1, 2) if genie else chance.randint(1, 4)):
        label = f"{case.name}/{number}"
        work: AnyWorkload
        if genie:
            prompt = chance.choice(_PROMPTS)
            queries: list[AnyWorkload] = [
                Generate(prompt=prompt, max_tokens=_TOKENS),
                Bench(prompt_tokens=16, new_tokens=_TOKENS, repetitions=2, warmup=0),
            ]
            work = chance.choice(queries)
        else:
            work = _command(chance.randrange(9), _word(label))
        name = chance.choice([None, None, "d0"])
        cells.append(
            make_cell(
                label,
                work,
                Requirement(name=name),
                container=lab.container if genie else None,
                container_sha256="container" if genie else "",
                replica=number,
                retries=Retries(device=chance.randint(0, 2), runner=chance.randint(0, 1)),
                timeout_s=patient(_GENIE_CELL_S if genie else _CELL_S),
            )
        )
    return cells


def _word(label: str) -> str:
    return f"{TOKEN}-{label.rpartition('-')[2].replace('/', '.')}"


def _command(kind: int, word: str) -> Command:
    scripts = {1: _DAEMON, 2: _STUBBORN, 3: _NOISY, 4: _HEAT}
    command: tuple[str, ...] = ("python3", "-c", _SLEEP, word)
    if kind == 0:
        command = ("echo", word)
    elif kind in scripts:
        command = ("sh", "-c", scripts[kind], word)
    return Command(command=command)


def begin(lab: Lab, farm: Farm, case: Case) -> list[Actor]:
    """One process that runs the plan."""
    cells = cells_of(lab, case)
    return [runner(lab, farm, case, cells, "run")]


def runner(lab: Lab, farm: Farm, case: Case, cells: list[Cell], name: str) -> Actor:
    """A process that runs cells, and tells how each ended."""

    def part(tell: Tell) -> None:
        with _open(lab, case) as (store, journal):
            journal.begin(fresh=False)
            settings = PlanSettings(runner_timeout_s=patient(_RUNNER_S))
            runner = DeviceCellRunner(store, ModelCache(), journal.plan_run_id, settings)
            options = MatrixOptions(lease_s=patient(_LEASE_S), purpose=case.name)

            done = runner.earlier_outcomes(cells, journal.ends)
            with Pool.open(farm.pool_file) as pool:
                summary = run_matrix(cells, pool, runner, journal, options=options, done=done)
            _tell(tell, summary)

    return Actor(name, part, lab.folder / f"{case.name}.log")


def _tell(tell: Tell, summary: Summary) -> None:
    for outcome in summary.outcomes:
        failures = [[failure.error, failure.reason] for _, failure in outcome.failures]
        tell(
            {
                "cell": outcome.cell.label,
                "key": outcome.cell.key,
                "status": outcome.status,
                "resumed": outcome.resumed,
                "summary": outcome.result.summary,
                "run_id": outcome.result.run_id,
                "failures": failures,
            }
        )


@contextmanager
def _open(lab: Lab, case: Case) -> Iterator[tuple[ResultsStore, Journal]]:
    folder = lab.folder / "results"
    folder.mkdir(exist_ok=True)
    with ResultsStore.open(folder / f"{case.name}.db") as store:
        yield store, Journal(store.database, "chaos")


def judge(
    lab: Lab, farm: Farm, case: Case, actors: list[Actor], struck: set[str]
) -> tuple[list[End], list[str]]:
    """Every cell's end, and what journal and store say of it."""
    ends = [end_of(actors[0])]
    ends += ends_of_cells(actors[0], "")
    left = {end.who for end in ends if end.outcome == "interrupted"}
    if ends[0].outcome in {"killed", "interrupted"} or left:
        # Whoever comes next goes on where that one ended, and nothing befalls it.
        for number in range(2):
            farm.commands(number).clear()
        second = runner(lab, farm, case, cells_of(lab, case), "run again")
        conduct([second], [], patient(90.0))
        ends.append(end_of(second))
        ends += ends_of_cells(second, "again: ")
        if second.end["end"] == "well" and any(
            end.outcome == "interrupted" and end.who.startswith("again") for end in ends
        ):
            ends.append(End("run again", "wrong", text="it left cells undone"))
    return ends, _complaints(lab, case, ends)


def ends_of_cells(actor: Actor, prefix: str) -> list[End]:
    """How the cells ended, and their tries, as an actor of `runner` tells."""
    ends = []
    for line in actor.told:
        if "cell" not in line:
            continue
        who = f"{prefix}cell {line['cell']}"
        ends += [End(f"{who}, a try", "error", *failure) for failure in line["failures"]]
        match line["status"]:
            case "done":
                right = line["run_id"] or line["summary"] == _word(line["cell"])
                text = "" if right else f"it says {line['summary']!r}"
                ends.append(End(who, "right" if right else "wrong", text=text))
            case "failed":
                ends.append(End(who, "error", *line["failures"][-1]))
            case _:
                ends.append(End(who, "interrupted"))
    return ends


def _complaints(lab: Lab, case: Case, ends: list[End]) -> list[str]:
    """What is wrong with the journal or the store, opened as the next user would."""
    complaints: list[str] = []
    cells = {cell.label: cell for cell in cells_of(lab, case)}
    final = {end.who.removeprefix("again: "): end for end in ends if not end.who.endswith("a try")}
    with _open(lab, case) as (store, journal):
        runs = store.list_runs(RunFilter())
        for label, cell in cells.items():
            end = final.get(f"cell {label}")
            known = journal.ends.get(cell.key)
            done = [run for run in runs if run.label == label and run.status == "done"]
            if end is None:
                continue
            if (known is not None and known.status == "done") != (end.outcome == "right"):
                complaints.append(f"{end}, but the journal has {known}")
            if cell.container is not None and len(done) != (end.outcome == "right"):
                complaints.append(f"{end}, but the store has {len(done)} runs that are done")
    for run in runs:
        if run.status == "running":
            complaints.append(f"run {run.id} of {run.label} runs for ever")
        if run.status == "done":
            complaints += _wrong_run(lab, run)
    return complaints


def _wrong_run(lab: Lab, run: Run) -> list[str]:
    """Return whether what is stored as good is what was right without a fault."""
    count = run.workload.repetitions or 1
    wrong = []
    right = lab.texts[key_of(run)]
    if run.generated_text != right:
        wrong.append(f"{run.label} is stored with {run.generated_text!r} instead of {right!r}")
    if run.check.outcome == "failed":
        wrong.append(f"{run.label} is done, but its check failed")
    counts = {metric: len(run.values(metric)) for metric in _EACH}
    if set(counts.values()) != {count}:
        wrong.append(f"{run.label} has {counts} values for {count} repetitions")
    return wrong


def key_of(run: Run) -> str:
    """What decides about a right answer."""
    return json.dumps([run.kind, run.workload.prompt])


def learn(lab: Lab) -> None:
    """Ask every prompt once while nothing is wrong: what is right is known from then on."""
    if lab.texts:
        return
    works: list[AnyWorkload] = [Generate(prompt=prompt, max_tokens=_TOKENS) for prompt in _PROMPTS]
    works.append(Bench(prompt_tokens=16, new_tokens=_TOKENS, repetitions=1, warmup=0))
    cells = [
        make_cell(f"learn/{n}", work, Requirement(), container=lab.container, replica=n)
        for n, work in enumerate(works)
    ]
    case = Case(0, 0, "genie", (), (), 1, 0.0)
    actor = runner(lab, lab.roomy, case, cells, "learn")
    conduct([actor], [], patient(300.0))
    assert actor.end["end"] == "well", actor.end
    with _open(lab, case) as (store, _):
        for run in store.list_runs(RunFilter(status="done")):
            lab.texts[key_of(run)] = run.generated_text or ""
    assert len(lab.texts) == len(works), actor.told
