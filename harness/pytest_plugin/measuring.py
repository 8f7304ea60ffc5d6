"""`record_measurement`: a test's own numbers, to junit, the results store and the terminal."""

from typing import TYPE_CHECKING

from harness.results.metrics import find_metric
from harness.results.records import Measurement, Run, Workload, new_run_id, now

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from harness.pytest_plugin.running import ContainerRunner
    from harness.results.records import RunStatus
    from harness.results.store import ResultsStore


class MeasurementRecorder:
    """Keeps what a test measured; made for one test.

    Args:
        runner: what ran the container; `None` in a test without one, whose numbers go to junit
            and the terminal only: the store keeps no number without what was run.
        add_property: of junit.
        add_row: of the table that ends the session.
    """

    def __init__(
        self,
        runner: "ContainerRunner | None",
        open_store: "Callable[[], ResultsStore]",
        add_property: "Callable[[str, object], None]",
        add_row: "Callable[[Mapping[str, object]], None]",
    ) -> None:
        self._runner = runner
        self._open_store = open_store
        self._add_property = add_property
        self._add_row = add_row
        self._began = now()
        self._session = new_run_id()
        self._kept: dict[str, list[Measurement]] = {}

    def __call__(self, metric: str, value: float, *, test: str = "") -> None:
        """Record one value; a second one of the same metric and test is its next repetition.

        Args:
            metric: a key of `harness.results.metrics.METRICS`.
            value: in the unit of the metric.
            test: what was measured, in llama-bench's terms: `pp512`, `tg128`. With it, the value
                has its line in the table at the end.

        Raises:
            UnknownMetricError, MetricValueError: nothing is recorded.
        """
        legal = find_metric(metric).check(float(value))
        kept = self._kept.setdefault(test, [])
        repetition = sum(one.metric == metric for one in kept)
        kept.append(Measurement(metric=metric, value=legal, repetition=repetition))
        self._add_property(f"{metric}[{test}]" if test else metric, legal)
        if test:
            self.show(test, metric, (legal,))

    def note(self, metric: str, value: float) -> None:
        """Tell junit of a number that is in the results store already.

        Raises:
            UnknownMetricError, MetricValueError: it is none.
        """
        self._add_property(metric, find_metric(metric).check(float(value)))

    def run(self, run: Run, metric: str, *, test: str) -> None:
        """Show what a stored run has of a metric, warm-ups left out; it is not stored again.

        Args:
            run: of `run_container.benchmark`.
            test: as above.
        """
        values = run.values(metric)
        for value in values:
            self._add_property(f"{metric}[{test}]", value)
        if values:
            self.show(test, metric, values, session=run.id)

    def show(self, test: str, metric: str, values: tuple[float, ...], *, session: str = "") -> None:
        """A line of the table at the end of the session.

        Args:
            session: of which the values are repetitions; by default this test.
        """
        row = {
            "test": test,
            "metric": metric,
            "values": list(values),
            "session": session or self._session,
        }
        if self._runner is None:
            self._add_row({"model": "", **row})
            return
        container, device = self._runner.target.container_info, self._runner.target.device_info
        metadata = self._runner.container.metadata
        self._add_row(
            {
                "model": container.model,
                "container": container.sha256,
                "size": sum(record.size_bytes for record in metadata.files.values()),
                "params": metadata.model.parameters,
                "backend": f"HTP {metadata.target.dsp_arch}"
                + (" (emulator)" if device.emulator else ""),
                "device": device.serial,
                "soc": device.soc,
                "emulator": device.emulator,
                **row,
            }
        )

    def finish(self, status: "RunStatus", error: str | None = None) -> tuple[str, ...]:
        """Write what was recorded, as one run for each `test`; gives their identifiers.

        Args:
            status: how the test ended.
            error: what went wrong, if it failed.
        """
        if self._runner is None or not self._kept:
            return ()
        runs = [self._run_of(self._runner, test, status, error) for test in self._kept]
        with self._open_store() as store:
            for run in runs:
                store.write_run(run)
        return tuple(run.id for run in runs)

    def _run_of(
        self, runner: "ContainerRunner", test: str, status: "RunStatus", error: str | None
    ) -> Run:
        container, device, provenance = runner.records()
        return Run(
            kind="bench",
            status=status,
            error=error,
            created_at=self._began,
            finished_at=now(),
            group_id=runner.group("recorded", test),
            session=runner.session,
            label=test or runner.label,
            container=container,
            device=device,
            provenance=provenance,
            # Reports put runs together by what was asked; here that is the test.
            workload=Workload(runner=runner.runtime.runner, prompt=f"{runner.case} {test}".strip()),
            measurements=tuple(self._kept[test]),
        )
