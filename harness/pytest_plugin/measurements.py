"""Measurements of tests: recorded, stored, and shown as llama-bench's markdown table."""

from collections.abc import Callable, Mapping, Sequence

from buildlib.targets import parse_target
from harness.console import EMULATOR, visible
from harness.pytest_plugin.recordings import TestRecordings
from harness.results.identity import container_name
from harness.results.llama_bench import format_parameters, format_size, markdown
from harness.results.metrics import Measurement, find_metric, summarise
from harness.results.records import Run, RunStatus, WorkloadRecord, new_run_id, now
from harness.runtimes.base import Generates
from harness.runtimes.deployed import DeployedRuntime
from harness.workloads.session import Session

_COLUMNS = ("model", "size", "params", "backend", "device", "test")

Row = Mapping[str, object]
"""A test's values of one metric, in plain types that xdist can send."""


def _backend(session: Session) -> str:
    """Name the processor: `HTP v79 (emulator)`, or the runtime where it runs no container."""
    target = session.container_info.target
    if not target:
        return session.model.runtime.name
    arch = parse_target(target).soc.dsp_arch
    return f"HTP {arch}" + (" (emulator)" if session.device_info.emulator else "")


class MeasurementRecorder:
    """Recorder of one test's measurements.

    Args:
        recordings: of the test; `None` in a test without a session: its numbers go to junit and
            the terminal alone.
        add_property: of junit.
        rows: of the table that ends the session.
    """

    def __init__(
        self,
        recordings: TestRecordings | None,
        add_property: Callable[[str, object], None],
        rows: list[dict[str, object]],
    ) -> None:
        self._recordings = recordings
        self._add_property = add_property
        self._rows = rows
        self._began = now()
        self._session = new_run_id()
        self._kept: dict[str, list[Measurement]] = {}

    def __call__(self, metric: str, value: float, *, test: str = "") -> None:
        """Record one value; a second one of the same metric and test is its next repetition.

        Args:
            metric: a key of `harness.results.metrics.METRICS`.
            value: in the unit of the metric.
            test: workload in llama-bench's terms: `pp512`, `tg128`. With it, the value
                has its line in the table at the end.
        """
        legal = find_metric(metric).check(float(value))
        measurements = self._kept.setdefault(test, [])
        repetition = sum(one.metric == metric for one in measurements)
        measurements.append(Measurement(metric=metric, value=legal, repetition=repetition))
        self._add_property(f"{metric}[{test}]" if test else metric, legal)
        if test:
            self.show(test, metric, (legal,))

    def note(self, metric: str, value: float) -> None:
        """Add a number that is already stored to junit.xml."""
        self._add_property(metric, find_metric(metric).check(float(value)))

    def run(self, run: Run, metric: str, *, test: str) -> None:
        """Show a stored run's values of a metric, without warm-ups.

        Args:
            run: of a benchmark.
            test: as above.
        """
        values = run.values(metric)
        for value in values:
            self._add_property(f"{metric}[{test}]", value)
        if values:
            self.show(test, metric, values, session=run.id)

    def show(self, test: str, metric: str, values: tuple[float, ...], *, session: str = "") -> None:
        """Add a line to the table at the end of the session.

        Args:
            session: of which the values are repetitions; by default this test.
        """
        row = {
            "test": test,
            "metric": metric,
            "values": list(values),
            "session": session or self._session,
        }
        if self._recordings is None:
            self._rows.append({"model": "", **row})
            return
        session_of_test = self._recordings.session
        container, device = session_of_test.container_info, session_of_test.device_info
        self._rows.append(
            {
                "model": container_name(container),
                "container": container.sha256,
                "size": container.size_bytes,
                "params": container.parameters,
                "backend": _backend(session_of_test),
                "device": device.serial,
                "soc": device.soc,
                "emulator": device.emulator,
                **row,
            }
        )

    def finish(self, status: RunStatus, error: str | None = None) -> tuple[str, ...]:
        """Store the measurements as one run for each `test`, and return the runs' ids.

        Args:
            status: how the test ended.
            error: of a test that failed.
        """
        if self._recordings is None:
            return ()
        runs = [self._run_of(self._recordings, test, status, error) for test in self._kept]
        for run in runs:
            self._recordings.store.open().write_run(run)
        return tuple(run.id for run in runs)

    def _run_of(
        self, recordings: TestRecordings, test: str, status: RunStatus, error: str | None
    ) -> Run:
        session = recordings.session
        container, device, provenance = session.records()
        runner, runtime = session.runtime.runner(Generates), session.runtime
        deployed = isinstance(runtime, DeployedRuntime) and runtime.deployment is not None
        return Run(
            kind="bench",
            status=status,
            error=error,
            created_at=self._began,
            finished_at=now(),
            group_id=recordings.group_id("recorded", test),
            session=recordings.number,
            label=test or recordings.label,
            container=container,
            device=device,
            provenance=provenance,
            # Reports put runs together by what was asked; here that is the test.
            workload=WorkloadRecord(
                runner=runner,
                sampler=dict(session.settings),
                runner_sha256=runtime.sha256_of(runner) if deployed else None,
                prompt=f"{recordings.case} {test}".strip(),
            ),
            concurrent_sessions=session.count.highest,
            measurements=tuple(self._kept[test]),
        )


def format_table(rows: Sequence[Row]) -> list[str]:
    """Format a line for each container, backend, device and test; speeds are in tokens/s.

    Values of one cell are grouped by session, as with `--repeat`.
    """
    lines = []
    rates = [row for row in rows if str(row["metric"]).endswith("_tokens_per_s")]
    others = [row for row in rows if not str(row["metric"]).endswith("_tokens_per_s")]
    several = _ambiguous(rows)
    if rates:
        cells = [(*_cells(row, several), _spread(sessions)) for row, sessions in _merge(rates)]
        lines += markdown((*_COLUMNS, "t/s"), cells)
    if any(row.get("emulator") for row in rates):
        lines.append(EMULATOR)
    for row, sessions in _merge(others):
        metric = find_metric(str(row["metric"]))
        value = _spread(sessions, metric.scale, metric.decimals)
        where = " on ".join(filter(None, (_model(row, several), str(row.get("device") or ""))))
        test = f"{row['test']} of {where}" if where else row["test"]
        lines.append(f"{test}: {metric.label} {value} {metric.shown_unit}".rstrip())
    return [visible(line) for line in lines]


def _merge(rows: Sequence[Row]) -> list[tuple[Row, list[list[float]]]]:
    """Return the first row of each cell, with the values of each session."""
    cells: dict[tuple[object, ...], tuple[Row, dict[object, list[float]]]] = {}
    for row in rows:
        names = ("model", "container", "backend", "device", "test", "metric")
        _, sessions = cells.setdefault(tuple(row.get(name) for name in names), (row, {}))
        values = [value for value in _sequence(row["values"]) if isinstance(value, float)]
        sessions.setdefault(row.get("session"), []).extend(values)
    return [(row, list(sessions.values())) for row, sessions in cells.values()]


def _ambiguous(rows: Sequence[Row]) -> frozenset[object]:
    """Return the models with more than one container."""
    containers: dict[object, set[object]] = {}
    for row in rows:
        containers.setdefault(row.get("model"), set()).add(row.get("container"))
    return frozenset(model for model, sha256s in containers.items() if len(sha256s) > 1)


def _model(row: Row, several: frozenset[object]) -> str:
    model = str(row.get("model") or "")
    return f"{model} {str(row.get('container'))[:12]}" if row.get("model") in several else model


def _sequence(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else []


def _cells(row: Row, several: frozenset[object]) -> tuple[str, ...]:
    device = " ".join(str(row.get(key) or "") for key in ("soc", "device")).strip()
    return (
        _model(row, several),
        format_size(row.get("size")),
        format_parameters(row.get("params")),
        str(row.get("backend") or ""),
        device,
        str(row["test"]),
    )


def _spread(sessions: Sequence[Sequence[float]], scale: float = 1.0, decimals: int = 2) -> str:
    """Format mean and standard deviation as reports do; one value has no spread."""
    stats = summarise(sessions)
    if stats is None:
        return ""
    mean = f"{stats.mean * scale:.{decimals}f}"
    return mean if stats.sd is None else f"{mean} ± {stats.sd * scale:.{decimals}f}"
