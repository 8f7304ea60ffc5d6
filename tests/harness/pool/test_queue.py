import itertools
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from hypothesis import example, given
from hypothesis import strategies as st

from harness.pool.queue import Request, keep, served

_DEVICES = "abcdef"


def serve(
    requests: Sequence[Request], free: AbstractSet[str], in_use: AbstractSet[str]
) -> Mapping[int, Sequence[str]]:
    return served(keep(requests, free, in_use))


_requests = st.lists(
    st.tuples(st.sets(st.sampled_from(_DEVICES), min_size=1), st.integers(1, 4)), max_size=6
).map(
    lambda asked: [
        Request(number, tuple(sorted(wanted)), min(count, len(wanted)))
        for number, (wanted, count) in enumerate(asked)
    ]
)
_free = st.sets(st.sampled_from(_DEVICES))


def can_serve(requests: Sequence[Request], free: frozenset[str]) -> bool:
    """Return whether all can be served at once, by trying."""
    if not requests:
        return True
    first, *rest = requests
    usable = [key for key in first.candidates if key in free]
    return any(
        can_serve(rest, free - set(taken)) for taken in itertools.combinations(usable, first.count)
    )


@given(_requests, _free, _free)
def test_served_requests_are_complete_and_share_no_device(
    requests: list[Request], free: set[str], busy: set[str]
) -> None:
    tickets = serve(requests, free, busy - free)
    taken = [key for keys in tickets.values() for key in keys]
    assert len(taken) == len(set(taken))
    assert set(taken) <= free
    for request in requests:
        if request.ticket in tickets:
            assert len(tickets[request.ticket]) == request.count
            assert set(tickets[request.ticket]) <= set(request.candidates)


@example([Request(0, ("a",), 1), Request(1, ("a", "b"), 1)], {"a", "b"})
@given(_requests, _free)
def test_older_requests_come_first_and_make_room_for_others(
    requests: list[Request], free: set[str]
) -> None:
    """As long as all requests up to one can be served together, they are."""
    tickets = serve(requests, free, set(_DEVICES) - free)
    for length in range(1, len(requests) + 1):
        if not can_serve(requests[:length], frozenset(free)):
            break
        assert requests[length - 1].ticket in tickets


@given(_requests, _free)
def test_a_later_request_takes_no_device_that_an_earlier_one_needs(
    requests: list[Request], free: set[str]
) -> None:
    """No device of a later request would have brought an earlier one nearer to its count."""
    tickets = serve(requests, free, set(_DEVICES) - free)
    for place, request in enumerate(requests):
        if request.ticket in tickets:
            continue
        before = requests[:place]
        for later in requests[place + 1 :]:
            for key in tickets.get(later.ticket, ()):
                without = serve([*before, request], free - {key}, set(_DEVICES) - free | {key})
                together = serve([*before, request], free, set(_DEVICES) - free)
                assert request.ticket not in together
                assert set(without) == set(together)


def test_a_request_for_an_absent_device_keeps_its_place_but_no_devices() -> None:
    big, small = Request(1, ("a", "gone"), 2), Request(2, ("a",), 1)
    assert serve([big, small], {"a"}, set()) == {2: ["a"]}
    assert serve([big, small], {"a"}, {"gone"}) == {}
    assert serve([big, small], {"a", "gone"}, set()) == {1: ["a", "gone"]}


def test_a_long_chain_of_requests_makes_room() -> None:
    """Each request accepts its device or the next; the last one needs that of the first."""
    names = [f"d{number:04}" for number in range(2001)]
    requests = [Request(n, (names[n], names[n + 1]), 1) for n in range(2000)]
    tickets = serve([*requests, Request(2000, (names[0],), 1)], frozenset(names), frozenset())
    assert len(tickets) == 2001
    assert tickets[2000] == [names[0]]
