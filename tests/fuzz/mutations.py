"""Registry of mutations, each of which damages or forges one file of a model folder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

Rng = np.random.Generator
Apply = Callable[[Rng, Path], str]
T = TypeVar("T")


@dataclass(frozen=True)
class Mutation:
    """A change to a model folder.

    Attributes:
        apply: makes the change, and describes it.
        must_fail: whether no builder may accept the result.
        odd_weights: whether weights may get values for which rounding decides results.
        weight: relative frequency.
    """

    name: str
    apply: Apply
    must_fail: bool = False
    odd_weights: bool = False
    weight: int = 1


REGISTRY: list[Mutation] = []


def mutation(
    *, must_fail: bool = False, odd_weights: bool = False, weight: int = 1
) -> Callable[[Apply], Apply]:
    """Register a function as a mutation of its name."""

    def register(apply: Apply) -> Apply:
        REGISTRY.append(Mutation(apply.__name__, apply, must_fail, odd_weights, weight))
        return apply

    return register


def pick(rng: Rng, values: Sequence[T]) -> T:
    """Return a random one of `values`."""
    return values[int(rng.integers(len(values)))]


def draw(rng: Rng) -> Mutation:
    """Draw a mutation from the registry."""
    weights = np.array([one.weight for one in REGISTRY], dtype=float)
    return REGISTRY[int(rng.choice(len(REGISTRY), p=weights / weights.sum()))]


def damaged(rng: Rng, data: bytes) -> tuple[bytes, str]:
    """Bytes with one kind of damage."""
    size = len(data)
    at = int(rng.integers(size)) if size else 0
    span = min(2 ** int(rng.integers(0, 12)), max(1, size - at))
    junk = rng.bytes(span)
    kinds: dict[str, Callable[[], bytes]] = {
        "truncated": lambda: data[:at],
        "cut out": lambda: data[:at] + data[at + span :],
        "zeroed": lambda: data[:at] + bytes(span) + data[at + span :],
        "overwritten": lambda: data[:at] + junk + data[at + span :],
        "inserted": lambda: data[:at] + junk + data[at:],
        "repeated": lambda: data[: at + span] + data[at:],
        "junk": lambda: rng.bytes(min(size, 4096)),
        "empty": lambda: b"",
    }
    chance = [0.14, 0.14, 0.14, 0.14, 0.14, 0.14, 0.08, 0.08]
    kind = str(rng.choice(list(kinds), p=chance))
    return kinds[kind](), f"{kind} {span} at {at} of {size}"


def flipped(rng: Rng, data: bytes) -> tuple[bytes, str]:
    """Bytes with a few bits turned."""
    found = bytearray(data)
    places = []
    for _ in range(int(2 ** rng.integers(0, 5))):
        at = int(rng.integers(len(found)))
        found[at] ^= 1 << int(rng.integers(8))
        places.append(at)
    return bytes(found), f"flipped bits at {places[:6]}"


def rewrite(path: Path, data: bytes) -> None:
    """Replace a file; others that are linked to it keep what they have."""
    path.unlink()
    path.write_bytes(data)


ODD_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 2**31, 2**64, -(2**70), 0.5, 1e308, -0.0, float("nan"),
    float("inf"), "", "x", "a\nb", "\x00", "1", [], [None], [[[]]], {}, {"": {}}, "y" * 5000,
)  # fmt: skip
"""Unexpected values for a field of JSON."""
