"""Cells on real devices: what each kind of work does there, and what it leaves: nothing."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from buildlib.container.container import GenAIContainer
from harness.clock import Deadline
from harness.devices.base import Device
from harness.errors import HostFileError, OutputCheckError, one_line
from harness.plans.cells import Cell
from harness.plans.guard import Guard, guarded
from harness.plans.outcome import CellResult
from harness.plans.plan_file import BenchWork, CommandWork, GenerateWork, PerplexityWork
from harness.plans.results import ResultsLater
from harness.plans.seams import LeasedDevice
from harness.pool.leased_device import LeasedDevice as PoolDevice
from harness.results.metrics import METRICS
from harness.results.records import DeviceInfo, Run, Workload
from harness.results.store import ResultsStore, RunFilter
from harness.runtimes.base import GenerationRequest
from harness.runtimes.genie import GenieRuntime
from harness.telemetry.conditions import Conditions
from harness.workloads.bench import BenchPlan
from harness.workloads.expectations import Wanted, expecting
from harness.workloads.output_check import (
    Expectation,
    ReferenceText,
    bounded_quality,
    read_tokens,
)
from harness.workloads.perplexity import perplexity_workload
from harness.workloads.session import Conditioning, measured_under, run_session, unconditioned
from harness.workloads.target import Target

_SWEEP_S = 30.0
_SHOWN = ("prefill_tokens_per_s", "decode_tokens_per_s", "perplexity")
_KEPT_OUTPUT = 64 << 10


class Containers:
    """Containers by their folders, each read once; for several threads."""

    def __init__(self) -> None:
        self._loaded: dict[Path, GenAIContainer] = {}
        self._loading = threading.Lock()

    def load(self, path: Path) -> GenAIContainer:
        """The container of a folder.

        Raises:
            BuildError: it is not whole.
        """
        with self._loading:
            if path not in self._loaded:
                self._loaded[path] = GenAIContainer.load(path)
            return self._loaded[path]


@dataclass(frozen=True, slots=True)
class DeviceCellRunner:
    """Runs cells on devices of the pool, and keeps their results in a store; `CellRunner`.

    Attributes:
        campaign: of the journal; what groups the sessions of a cell is derived from it.
        resolve: where a path of the plan lies.
        runner_s: for one process of the runner on a device.
        conditions: of benchmarks; `None` measures devices as they are.
        telemetry_hz: samples a second while a device generates; `None`: no telemetry.
    """

    store: ResultsStore | ResultsLater
    containers: Containers
    campaign: str
    resolve: Callable[[str], Path]
    runner_s: float = 300.0
    conditions: Conditions | None = None
    telemetry_hz: float | None = None

    def run(self, cell: Cell, device: LeasedDevice, guard: Guard) -> CellResult:
        """Run one cell; see `CellRunner.run`."""
        work = cell.work
        usable = guarded(device, guard)
        if isinstance(work, CommandWork):
            if isinstance(device, PoolDevice):
                device.dirty = True  # what a command leaves running ends with the lease
            with guard.ending(lambda: _end_all(device)):
                return _run_command(work, usable, cell.timeout_s)
        # What cleans up runs on the device too, and is not to be ended with the rest.
        with self._target(cell, usable, guard) as target, guard.ending(lambda: _end_all(device)):
            if isinstance(work, BenchWork):
                return self._bench(cell, work, target)
            if isinstance(work, PerplexityWork):
                return self._perplexity(cell, work, target)
            return self._generate(cell, work, target)

    def group_id(self, cell: Cell) -> str:
        """What the sessions of a cell share in the store, for as long as the plan goes on."""
        return hashlib.sha256(f"{self.campaign}:{cell.group}".encode()).hexdigest()[:32]

    def finished(self, cell: Cell) -> CellResult | None:
        """What the store holds of a cell that an earlier run of the plan has done.

        The store is asked, not the journal, so that a process killed between the two repeats
        nothing, and results that were deleted are measured again.
        """
        if isinstance(cell.work, CommandWork):
            return None
        wanted = RunFilter(status="done", group_id=self.group_id(cell))
        store = self.store.there if isinstance(self.store, ResultsLater) else self.store
        found = [] if store is None else store.list_runs(wanted)
        done = [run for run in found if run.session == cell.session]
        return _result(done[-1]) if done else None

    @property
    def has_results(self) -> bool:
        """Whether there is a database."""
        return not isinstance(self.store, ResultsLater) or self.store.there is not None

    @property
    def _results(self) -> ResultsStore:
        """The store, to be written to."""
        return self.store.made() if isinstance(self.store, ResultsLater) else self.store

    @contextmanager
    def _target(self, cell: Cell, device: Device, guard: Guard) -> Iterator[Target]:
        if cell.container is None:
            raise ValueError(f"the cell {cell.label} has no container")
        container = self.containers.load(cell.container)
        properties = device.properties()
        runtime = GenieRuntime(
            device,
            properties,
            container,
            timeout_s=self.runner_s,
            deploy_timeout_s=cell.timeout_s,
            telemetry_hz=self.telemetry_hz,
        )
        try:
            yield Target(container, device, properties, runtime)
        finally:
            with guard.exempt():
                runtime.clean()

    def _bench(self, cell: Cell, work: BenchWork, target: Target) -> CellResult:
        plan = BenchPlan(
            prompt_tokens=work.prompt_tokens,
            new_tokens=work.new_tokens,
            repetitions=work.repetitions,
            warmup=None if work.warmup == "auto" else work.warmup,
            most_warmups=work.most_warmups,
        )
        target.runtime.check_room(work.prompt_tokens, work.new_tokens)
        session = plan.session_of(target.container)
        records = target.records()
        wanted = Wanted(max_perplexity=work.max_perplexity)
        if work.reference_tokens is not None:
            tokens = read_tokens(self.resolve(work.reference_tokens))
            wanted = Wanted(tokens, work.reference_tokens, work.max_perplexity)
        expectations = expecting(wanted, work.new_tokens, self._results)(target)
        run = run_session(
            target.runtime,
            replace(
                session,
                expectations=(*expectations, *self._first_session(cell, records[1])),
                around=self._around(target.device),
            ),
            records,
            self._results,
            group_id=self.group_id(cell),
            session=cell.session,
            label=cell.label,
        )
        return _result(run)

    def _around(self, device: Device) -> Conditioning:
        if self.conditions is None:
            return unconditioned
        return partial(measured_under, self.conditions, device)

    def _first_session(self, cell: Cell, device: DeviceInfo) -> Iterator[Expectation]:
        wanted = RunFilter(
            kind="bench",
            status="done",
            group_id=self.group_id(cell),
            soc=device.soc,
            emulator=device.emulator,
        )
        for run in self._results.list_runs(wanted)[:1]:
            if run.generated_text is not None:
                yield ReferenceText(run.generated_text, run.check)

    def _perplexity(self, cell: Cell, work: PerplexityWork, target: Target) -> CellResult:
        text = _read(self.resolve(work.text))
        runtime = target.runtime
        windows = runtime.windows(text, work.windows)
        run = self._new_run(cell, target, perplexity_workload(runtime, text, windows))
        with self._results.recording(run) as recorder:
            recorder.add_library_versions(runtime.versions())
            result = runtime.score(windows)
            recorder.add_values({"perplexity": result.perplexity})
            if work.max is not None:
                check = bounded_quality(result.perplexity, work.max).check
                recorder.set_check(check.outcome, check.reason)
                if check.outcome == "failed":
                    raise OutputCheckError(target.device.serial, check.reason)
        return _result(self._results.get_run(run.id))

    def _generate(self, cell: Cell, work: GenerateWork, target: Target) -> CellResult:
        runtime = target.runtime
        workload = Workload(
            runner=runtime.runner,
            max_new_tokens=work.max_tokens,
            prompt=work.prompt,
            sampler={"greedy": True},
        )
        run = self._new_run(cell, target, workload)
        with self._results.recording(run) as recorder:
            recorder.add_library_versions(runtime.versions())
            result = runtime.generate(GenerationRequest(work.max_tokens, prompt=work.prompt))
            recorder.generated_text = result.text
            if work.expect is not None and work.expect not in result.text:
                reason = f"the answer does not hold {work.expect[:80]!r}"
                recorder.set_check("failed", reason)
                raise OutputCheckError(target.device.serial, reason)
            if work.expect is not None:
                recorder.set_check("passed", f"the answer holds {work.expect[:80]!r}")
            recorder.add_values(result.metrics)
            recorder.add_telemetry(result.telemetry, repetition=0, is_warmup=False)
        return _result(self._results.get_run(run.id))

    def _new_run(self, cell: Cell, target: Target, workload: Workload) -> Run:
        container, device, provenance = target.records()
        return Run(
            kind="perplexity" if isinstance(cell.work, PerplexityWork) else "generate",
            group_id=self.group_id(cell),
            session=cell.session,
            label=cell.label,
            container=container,
            device=device,
            provenance=provenance,
            workload=workload,
        )


def _run_command(work: CommandWork, device: Device, timeout_s: float) -> CellResult:
    """One command; `env` makes sure that no word of it is read by a shell as something else."""
    done = device.shell(["env", *work.command], timeout_s=timeout_s, max_output=_KEPT_OUTPUT)
    last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "")
    return CellResult(summary=one_line(last, 60))


def _end_all(device: LeasedDevice) -> None:
    """End what runs on a device of the pool under our lease."""
    if isinstance(device, PoolDevice):
        deadline = Deadline.for_device(device.serial, "ending a cell", _SWEEP_S)
        device.fence.sweep(device.unleased, deadline)


def _result(run: Run) -> CellResult:
    values: Mapping[str, float] = {
        key: fmean(found) for key in METRICS if (found := run.values(key))
    }
    answer = one_line(run.generated_text or "", 60) if run.kind == "generate" else ""
    shown = [
        f"{METRICS[key].label} {METRICS[key].show(values[key])}" for key in _SHOWN if key in values
    ]
    return CellResult(run.id, answer or ", ".join(shown), values, run.device.emulator)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HostFileError(str(path), str(error)) from error
