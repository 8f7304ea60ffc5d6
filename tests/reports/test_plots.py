"""The plots of repetitions."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from harness.results.metrics import find_metric
from harness.results.records import Measurement, Run
from reports.plots import MOST_LANES, plots

Samples = Mapping[str, list[Run]]


def with_decode(run: Run, values: list[float]) -> Run:
    measured = tuple(
        Measurement(metric="decode_tokens_per_s", value=value, repetition=index)
        for index, value in enumerate(values)
    )
    return run.model_copy(update={"measurements": measured})


def test_every_repetition_is_a_point_and_warmups_are_marked(samples: Samples) -> None:
    decode = plots(samples["emulator"][:1])[1]
    (lane,) = decode.lanes
    assert decode.metric is find_metric("decode_tokens_per_s")
    assert [point.is_warmup for point in lane.points] == [True, False, False, False]
    assert [point.title for point in lane.points][:2] == [
        "warm-up 1: 14.90 tokens/s",
        "repetition 1: 17.21 tokens/s",
    ]
    assert lane.text == "17.22 ± 0.12"
    assert [tick.text for tick in decode.ticks] == ["0", "5", "10", "15", "20"]
    assert lane.points[1].x == round(100 * 17.21 / 20, 3)
    assert [point.y for point in lane.points] == sorted(point.y for point in lane.points)


def test_points_stay_inside_and_axes_are_readable(samples: Samples) -> None:
    run = samples["emulator"][0]

    @given(st.lists(st.floats(1e-6, 1e7), min_size=1, max_size=40))
    def check(values: list[float]) -> None:
        (plot,) = plots([with_decode(run, values)])
        (lane,) = plot.lanes
        assert len(lane.points) == len(values)
        assert all(0 <= point.x <= 100 and 0 <= point.y <= lane.height for point in lane.points)
        assert lane.mean_x is not None
        assert 0 <= lane.mean_x <= 100
        assert 2 <= len(plot.ticks) <= 6
        assert (plot.ticks[0].x, plot.ticks[-1].x) == (0, 100)

    check()


def test_old_runs_are_left_out_and_counted(samples: Samples) -> None:
    run = with_decode(samples["emulator"][0], [1.0])
    many = [run.model_copy(update={"id": f"{index:032x}"}) for index in range(MOST_LANES + 5)]
    (plot,) = plots(many)
    assert len(plot.lanes) == MOST_LANES
    assert plot.left_out == 5
    assert {lane.run.id for lane in plot.lanes} == {run.id for run in many[5:]}
