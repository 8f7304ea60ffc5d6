"""`record_measurement`: a test's own numbers, to junit, the results store and the terminal."""

from typing import TYPE_CHECKING

from harness.store.metrics import find_metric
from harness.store.records import Measurement, Run, Workload, now

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from harness.plugin.running import ContainerRunner
    from harness.store.store import ResultsStore


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
        nodeid: str,
        runner: "ContainerRunner | None",
        open_store: "Callable[[], ResultsStore]",
        add_property: "Callable[[str, object], None]",
        add_row: "Callable[[Mapping[str, object]], None]",
    ) -> None:
        self._nodeid = nodeid
        self._runner = runner
        self._open_store = open_store
        self._add_property = add_property
        self._add_row = add_row
        self._began = now()
        self._counts: dict[str, int] = {}
        self._kept: list[Measurement] = []

    def __call__(self, metric: str, value: float, *, test: str = "") -> None:
        """Record one value; a second one of the same metric is its next repetition.

        Args:
            metric: a key of `harness.store.metrics.METRICS`.
            value: in the unit of the metric.
            test: what was measured, in llama-bench's terms: `pp512`, `tg128`. With it, the value
                has its line in the table at the end.

        Raises:
            UnknownMetricError, MetricValueError: nothing is recorded.
        """
        legal = find_metric(metric).check(float(value))
        repetition = self._counts.get(metric, 0)
        self._counts[metric] = repetition + 1
        self._kept.append(Measurement(metric=metric, value=legal, repetition=repetition))
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
            self.show(test, metric, values)

    def show(self, test: str, metric: str, values: tuple[float, ...]) -> None:
        """A line of the table at the end of the session."""
        if self._runner is None:
            self._add_row({"model": "", "test": test, "metric": metric, "values": list(values)})
            return
        container, device = self._runner.target.container_info, self._runner.target.device_info
        metadata = self._runner.container.metadata
        self._add_row(
            {
                "model": container.model,
                "size": sum(record.size_bytes for record in metadata.files.values()),
                "params": metadata.model.parameters,
                "backend": f"HTP {metadata.target.dsp_arch}"
                + (" (emulator)" if device.emulator else ""),
                "device": device.serial,
                "soc": device.soc,
                "emulator": device.emulator,
                "test": test,
                "metric": metric,
                "values": list(values),
            }
        )

    def finish(self, failure: str) -> str | None:
        """Write what was recorded as one run; gives its identifier if there was anything.

        Args:
            failure: what went wrong in the test; empty if nothing did.
        """
        if self._runner is None or not self._kept:
            return None
        container, device, provenance = self._runner.records()
        run = Run(
            kind="bench",
            status="failed" if failure else "done",
            error=failure or None,
            created_at=self._began,
            finished_at=now(),
            container=container,
            device=device,
            provenance=provenance,
            workload=Workload(runner=self._runner.runtime.runner, prompt=self._nodeid),
            measurements=tuple(self._kept),
        )
        with self._open_store() as store:
            store.write_run(run)
        return run.id
