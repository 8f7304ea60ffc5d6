"""A schedule takes every token once, in order, with a graph that fits."""

from hypothesis import given
from hypothesis import strategies as st

from buildlib.numerics.trace import Schedule, alternating_schedule, single_graph_schedule


def check(schedule: Schedule, ars: set[int], cl: int, n_tokens: int) -> int:
    done = 0
    for call in schedule:
        assert call.ar in ars
        assert call.n_past == done
        assert 1 <= call.n_tokens <= call.ar
        assert call.n_past + call.ar <= cl
        done += call.n_tokens
    assert done <= n_tokens
    return done


@given(st.sets(st.sampled_from([1, 2, 8, 16, 32]), min_size=1), st.integers(1, 96))
def test_all_tokens_are_taken_when_one_graph_decodes(ars: set[int], n_tokens: int) -> None:
    ars = ars | {1}
    assert check(alternating_schedule(ars, 96, n_tokens), ars, 96, n_tokens) == n_tokens


@given(st.sets(st.integers(1, 96), min_size=1), st.integers(1, 200), st.integers(97, 200))
def test_no_call_exceeds_the_context(ars: set[int], n_tokens: int, cl: int) -> None:
    assert check(alternating_schedule(ars, cl, n_tokens), ars, cl, n_tokens) >= 1
    for ar in ars:
        assert check(single_graph_schedule(ar, cl, n_tokens), {ar}, cl, n_tokens) == min(
            n_tokens, cl // ar * ar
        )


def test_every_graph_has_its_turn_and_the_largest_most() -> None:
    calls = alternating_schedule([1, 32, 128], 512, 200)
    taken = {ar: sum(c.n_tokens for c in calls if c.ar == ar) for ar in (1, 32, 128)}
    assert taken == {1: 25, 32: 24, 128: 151}
    assert [call.ar for call in calls[:3]] == [1, 128, 128]
    assert alternating_schedule([1, 32], 64, 3)[-1].ar == 1
