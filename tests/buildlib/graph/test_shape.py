"""Impossible shapes are refused."""

import pytest

from buildlib.errors import BuildError
from buildlib.graph.shape import GraphShape


@pytest.mark.parametrize(
    ("ar", "cl", "reason"),
    [
        (0, 8, "AR must be at least 1"),
        (-1, 8, "AR must be at least 1"),
        (8, 8, "CL must be larger than AR"),
        (9, 8, "CL must be larger than AR"),
        (1, (1 << 20) + 1, "CL can be 1048576 at most"),
        (5, 192, "AR must divide CL; divisors near 5: 4, 6"),
        (40, 192, "AR must divide CL; divisors near 40: 32, 48"),
        (100, 192, "AR must divide CL; divisors near 100: 96"),
    ],
)
def test_impossible_shapes_are_refused(ar: int, cl: int, reason: str) -> None:
    with pytest.raises(BuildError) as caught:
        GraphShape(ar, cl)
    assert str(caught.value) == f"invalid shape AR {ar}, CL {cl}: {reason}"
    assert caught.value.exit_code == 2


def test_its_name_and_past() -> None:
    shape = GraphShape(32, 192)
    assert (str(shape), shape.past) == ("ar32_cl192", 160)
