"""Metrics of a lab for Prometheus, in its text format."""

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from harness.pool.states import MemberState
from plugins.lab.page.board import Board

__all__ = ["CONTENT_TYPE", "render_metrics"]


def render_metrics(board: Board) -> bytes:
    """Render a board; a page and its metrics never disagree."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_BoardCollector(board))
    return generate_latest(registry)


class _BoardCollector:
    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        board = self._board
        states = Counter(device.state for device in board.devices)
        yield _gauge("devices", "Devices of the pool.", ["state"], {
            (state.value,): states[state] for state in MemberState
        })  # fmt: skip
        yield _gauge("device_state", "1 for the state that a device is in.", ["device", "state"], {
            (device.name, device.state.value): 1 for device in board.devices
        })  # fmt: skip
        yield _gauge(
            "device_temperature_celsius",
            "Hottest zone of a device when it was last measured.",
            ["device"],
            {
                (device.name,): celsius
                for device in board.devices
                if (celsius := board.temperature(device)) is not None
            },
        )
        yield _gauge("waiting_requests", "Requests for devices that wait.", [], {
            (): len(board.waiting)
        })  # fmt: skip
        yield _gauge("longest_wait_seconds", "Age of the oldest request that waits.", [], {
            (): max((board.at - one.since for one in board.waiting), default=0.0)
        })  # fmt: skip
        yield _gauge("running_runs", "Runs that go on.", [], {(): len(board.running)})
        yield _gauge(
            "running_tokens_per_second",
            "Newest speed of a run that goes on.",
            ["device", "model", "metric", "emulator"],
            {
                (
                    one.run.device.serial,
                    one.run.container.model,
                    one.metric,
                    str(one.run.device.emulator).lower(),
                ): one.value
                for one in board.running
                if one.value is not None
            },
        )
        cells = Counter[tuple[str, ...]]()  # a plan may have two runs
        for plan in board.lab.plans:
            for state in ("waiting", "running", "done", "failed"):
                cells[plan.plan, state] += getattr(plan, state)
        yield _gauge("plan_cells", "Cells of plans that go on.", ["plan", "state"], cells)
        devices = Counter[tuple[str, ...]]()  # and a host two workers
        for host in board.lab.hosts:
            devices[(host.name,)] += host.devices
        yield _gauge("host_devices", "Devices of hosts with workers.", ["host"], devices)
        alerts = Counter(alert.state for alert in board.alerts)
        yield _gauge("alerts", "Losses that nobody has settled.", ["state"], {
            (state,): alerts[state] for state in ("open", "acknowledged")
        })  # fmt: skip
        level = board.report.headline.level
        yield _gauge("verdict", "1 for the verdict over all results.", ["level"], {
            (one,): float(one == level) for one in ("good", "doubt", "bad", "none")
        })  # fmt: skip
        yield _gauge("trouble", "Parts of the lab that cannot be read.", [], {
            (): len(board.trouble)
        })  # fmt: skip


def _gauge(
    name: str, about: str, labels: list[str], values: "Mapping[tuple[str, ...], float]"
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"qnnfarm_{name}", about, labels=labels)
    for key, value in values.items():
        family.add_metric(list(key), value)
    return family
