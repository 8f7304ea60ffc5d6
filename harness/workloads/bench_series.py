"""Sessions of benchmarks in a series, which take turns, and of two containers that are compared.

Of several benchmarks, the first session of each comes before the second of any. For a comparison,
each pair of sessions runs on one device, one after the other: A B, B A, A B, ... so that slow drift
(heat, charge, background work) favours neither.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from harness.devices.device import Device
from harness.errors import WrongUseError
from harness.results.comparison import ComparisonGroup, compare_runs
from harness.results.metrics import LEADING_METRICS
from harness.results.records import ComparisonRecord, Run, new_run_id
from harness.results.store import LazyResultsStore
from harness.results.verdicts import THRESHOLD
from harness.runtimes.base import Model
from harness.workloads.base import Recording
from harness.workloads.bench import Bench
from harness.workloads.session import DeviceSource, Session, SessionOptions

OnSession = Callable[[int, str, Session], None]
"""Called when a session begins, with its number from 0 and its label."""
Label = Literal["A", "B"]
Benchmark = tuple[Model, Bench]


@dataclass(frozen=True, slots=True)
class BenchSeries:
    """Runs benchmarks in several sessions.

    Attributes:
        devices: leases the device of each session, or pair of sessions.
        labels: the user's own keys and values, which every run is stored with.
        group_ids: of the benchmarks that have begun.
    """

    devices: DeviceSource
    store: LazyResultsStore
    options: SessionOptions = field(default_factory=SessionOptions)
    on_session: OnSession = lambda _number, _label, _session: None
    labels: Mapping[str, str] = field(default_factory=dict)
    group_ids: list[str] = field(default_factory=list)

    def run(self, benchmarks: Sequence[Benchmark], *, sessions: int) -> Iterator[tuple[int, Run]]:
        """Run sessions of benchmarks, each of which is a group; with a run comes its benchmark.

        Raises:
            WrongUseError: fewer than one session.
            HarnessError: a session failed; those before it are in the store, and so is it if it
                had begun.
        """
        _require_one(sessions)
        first = Recording(self.store.open, labels=self.labels)
        recordings = [replace(first, group_id=new_run_id()) for _ in benchmarks]
        self.group_ids.extend(recording.group_id for recording in recordings)
        for number in range(sessions):
            for index, (model, bench) in enumerate(benchmarks):
                recording = replace(recordings[index], session=number)
                with self.devices(number, model.info.soc, model.info.sha256) as device:
                    run = self._run(device, model, bench, recording)
                if number == 0:
                    recordings[index] = replace(recording, first=run)
                yield index, run

    def compare(
        self,
        bench: Bench,
        a: Model,
        b: Model,
        *,
        sessions: int,
        metrics: Sequence[str] = LEADING_METRICS,
        threshold: float = THRESHOLD,
    ) -> ComparisonGroup:
        """Run sessions of two containers in turns, labelled A and B, and compare them.

        The terms are stored before anything runs, and the verdict after it, so that all that read
        the store tell the same.
        """
        _require_one(sessions)
        group_id = new_run_id()
        self.group_ids.append(group_id)
        terms = ComparisonRecord(group_id=group_id, metrics=tuple(metrics), threshold=threshold)
        models: dict[Label, Model] = {"A": a, "B": b}
        first: dict[Label, Run] = {}
        runs = []
        for number in range(sessions):
            order: tuple[Label, ...] = ("B", "A") if number % 2 else ("A", "B")
            with self.devices(number, a.info.soc, f"{a.info.sha256}-{b.info.sha256}") as device:
                properties = device.properties()
                for model in (a, b):
                    model.check_fit(properties)  # before the other is measured for nothing
                if number == 0:
                    order = self._failed_first(device, bench, models) or order
                    self.store.open().write_comparison(terms)
                for label in order:
                    recording = Recording(
                        self.store.open, group_id, number, label, first.get(label),
                        labels=self.labels,
                    )  # fmt: skip
                    run = self._run(device, models[label], bench, recording)
                    first.setdefault(label, run)
                    runs.append(run)
        comparison = compare_runs(runs, metrics=metrics, threshold=threshold)
        self.store.open().write_comparison(comparison.record)
        return comparison

    def _failed_first(
        self, device: Device, bench: Bench, models: Mapping[Label, Model]
    ) -> tuple[Label, ...]:
        """Return the first side that fails its perplexity, before anything is measured."""
        for label, model in models.items():
            with Session(device, model, self.options) as session:
                quality = bench.judge_container(session, self.store.open())
            if quality is not None and quality.outcome == "failed":
                return (label,)
        return ()

    def _run(self, device: Device, model: Model, bench: Bench, recording: Recording) -> Run:
        with Session(device, model, self.options) as session:
            bench.check(model)
            self.on_session(recording.session, recording.label, session)
            return bench.run(session, recording).output


def _require_one(sessions: int) -> None:
    if sessions < 1:
        raise WrongUseError(f"sessions must be at least 1, not {sessions}")
