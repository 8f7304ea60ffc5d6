"""Parts take equally long to compile, as far as layers and the limit of their bytes allow."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib.errors import InvalidOptionError
from buildlib.passes.balance import (
    HEAD_COST,
    TABLE_COST,
    ModelWeights,
    SplitEnds,
    balance_layers,
    choose_emulated_splits,
    choose_splits,
)

SIZES = st.integers(0, 50)
MODELS = st.builds(
    lambda embedding, layers, head, *, tied: ModelWeights(
        {"table": embedding},
        tuple({f"layer_{index}": size, "shared": 3} for index, size in enumerate(layers)),
        {"table": embedding} if tied else {"head": head},
    ),
    SIZES,
    st.lists(SIZES, min_size=1, max_size=7),
    SIZES,
    tied=st.booleans(),
)
ENDS = SplitEnds(embedding=True, head=True)
APARTS = st.builds(SplitEnds, embedding=st.booleans(), head=st.booleans())


def bytes_and_times(
    weights: ModelWeights, parts: list[range], apart: SplitEnds
) -> list[tuple[int, float]]:
    """Bytes of each part with layers, each weight counted once, and its time to compile."""
    costs: list[tuple[int, float]] = []
    for part in filter(len, parts):
        layers = [weights.layers[layer] for layer in part]
        table = weights.embedding if part.start == 0 and not apart.embedding else {}
        head = weights.head if part.stop == len(weights.layers) and not apart.head else {}
        whole = {name: size for group in (*layers, table, head) for name, size in group.items()}
        time = float(sum(size for layer in layers for size in layer.values()))
        time += TABLE_COST * sum(table.values()) + HEAD_COST * sum(head.values())
        costs.append((sum(whole.values()), time))
    return costs


def part_sizes(weights: ModelWeights, parts: list[range], apart: SplitEnds) -> list[int]:
    return [size for size, _ in bytes_and_times(weights, parts, apart)]


def squared_costs(weights: ModelWeights, parts: list[range], apart: SplitEnds) -> float:
    return sum(time**2 for _, time in bytes_and_times(weights, parts, apart))


def all_ways(n_layers: int, n_parts: int) -> list[list[range]]:
    return [
        [range(a, b) for a, b in zip((0, *cuts), (*cuts, n_layers), strict=True)]
        for cuts in combinations(range(1, n_layers), n_parts - 1)
    ]


@given(weights=MODELS, apart=APARTS, limit=st.integers(0, 200), data=st.data())
def test_no_other_way_within_the_limit_is_more_even(
    weights: ModelWeights, apart: SplitEnds, limit: int, data: st.DataObject
) -> None:
    n_layers = len(weights.layers)
    n_inner = data.draw(st.integers(1, n_layers))
    parts = balance_layers(weights, n_inner + apart.count, apart, limit)
    inner = [part for part in parts if len(part)]
    assert [layer for part in inner for layer in part] == list(range(n_layers))
    assert len(parts) == n_inner + apart.count
    assert [not len(parts[0]), not len(parts[-1])] == [apart.embedding, apart.head]
    ways = [
        (max(part_sizes(weights, way, apart)), squared_costs(weights, way, apart))
        for way in all_ways(n_layers, n_inner)
    ]
    largest = max(limit, min(size for size, _ in ways))
    assert max(part_sizes(weights, parts, apart)) <= largest
    best = min(cost for size, cost in ways if size <= largest)
    assert squared_costs(weights, parts, apart) == pytest.approx(best)


@given(weights=MODELS, apart=APARTS, limit=st.integers(0, 200))
def test_the_fewest_parts_that_fit_are_chosen(
    weights: ModelWeights, apart: SplitEnds, limit: int
) -> None:
    each = balance_layers(weights, len(weights.layers) + apart.count, apart)
    ends = [weights.embedding] * apart.embedding + [weights.head] * apart.head
    alone = [*part_sizes(weights, each, apart), *(sum(end.values()) for end in ends)]
    if max(alone) > limit:
        with pytest.raises(InvalidOptionError, match="alone has"):
            choose_splits(weights, limit, apart)
        return
    count = choose_splits(weights, limit, apart)
    assert max(part_sizes(weights, balance_layers(weights, count, apart, limit), apart)) <= limit
    if count - 1 - apart.count >= 1:
        fewer = part_sizes(weights, balance_layers(weights, count - 1, apart, limit), apart)
        assert max(fewer) > limit


def test_the_emulator_gets_small_parts_even_of_one_large_table() -> None:
    layers = tuple({f"layer_{index}": 10 << 20} for index in range(24))
    for table, apart, count in ((0, SplitEnds(), 1), (500, SplitEnds(), 2), (500, ENDS, 4)):
        weights = ModelWeights({"table": table << 20}, layers, {"head": 0})
        assert choose_emulated_splits(weights, apart) == count
        assert len(balance_layers(weights, count, apart)) == count
    one = ModelWeights({"table": 800 << 20}, layers[:1], {})
    assert choose_emulated_splits(one, SplitEnds()) == 1


def test_tables_and_heads_take_bytes_more_than_time() -> None:
    """As in a model of 1B with 4-bit weights."""
    layers = tuple({f"layer_{index}": 30} for index in range(16))
    weights = ModelWeights({"table": 525}, layers, {"head": 262})
    parts = balance_layers(weights, 3, SplitEnds())
    assert list(map(len, parts)) == [5, 7, 4]
    assert part_sizes(weights, parts, SplitEnds()) == [675, 210, 382]
    assert list(map(len, balance_layers(weights, 3, SplitEnds(), 600))) == [2, 9, 5]
    assert list(map(len, balance_layers(weights, 3, SplitEnds(), 0))) == [1, 9, 6]


def test_a_heavy_head_gets_fewer_layers() -> None:
    layers = tuple({f"layer_{index}": 10} for index in range(6))
    weights = ModelWeights({"table": 0}, layers, {"head": 30})
    assert balance_layers(weights, 2, SplitEnds()) == [range(4), range(4, 6)]
    assert balance_layers(weights, 3, SplitEnds()) == [range(2), range(2, 5), range(5, 6)]
    assert weights.total == 90


def test_impossible_counts_are_one_line() -> None:
    weights = ModelWeights({"table": 5}, ({"a": 10}, {"b": 20}), {"head": 5})
    with pytest.raises(InvalidOptionError, match="4 parts cannot be made of 2 layers besides 1"):
        balance_layers(weights, 4, SplitEnds(head=True))
    with pytest.raises(InvalidOptionError, match="1 parts cannot be made"):
        balance_layers(weights, 1, SplitEnds(embedding=True))
    with pytest.raises(
        InvalidOptionError, match="layer 1 alone has 25 bytes of weights, a part at"
    ):
        choose_splits(weights, 20)
