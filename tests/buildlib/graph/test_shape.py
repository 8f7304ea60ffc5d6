"""Impossible shapes are refused."""

import pytest

from buildlib.errors import BuildError
from buildlib.graph.shape import GraphShape


@pytest.mark.parametrize(("ar", "cl"), [(0, 8), (-1, 8), (8, 8), (9, 8), (5, 192), (100, 192)])
def test_impossible_shapes_are_refused(ar: int, cl: int) -> None:
    with pytest.raises(BuildError, match=f"^invalid shape AR {ar}, CL {cl}: ") as caught:
        GraphShape(ar, cl)
    assert caught.value.exit_code == 2


def test_the_refusal_names_shapes_that_fit() -> None:
    with pytest.raises(BuildError, match="32, 48"):
        GraphShape(40, 192)


def test_its_name_and_past() -> None:
    shape = GraphShape(32, 192)
    assert (str(shape), shape.past) == ("ar32_cl192", 160)
