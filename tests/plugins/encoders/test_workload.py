"""The workload `embed`, as plans and journals have it."""

import pickle
from typing import Any

import pytest

from harness.errors import WrongUseError
from harness.workloads.registry import from_json, to_json
from plugins.encoders.workload import Embed


@pytest.mark.parametrize("more", [{}, {"reference": "model", "min_cosine": 0.9}])
def test_it_comes_back(more: dict[str, object]) -> None:
    workload: Any = Embed.of(texts=["a", "b"], **more)  # texts of a plan are a list
    assert workload.texts == ("a", "b")
    assert from_json(to_json(workload)) == workload
    assert pickle.loads(pickle.dumps(workload)) == workload  # noqa: S301


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "either `texts` or a `file`"),
        ({"texts": ("a",), "file": "b"}, "either `texts` or a `file`"),
        ({"texts": ("a",), "min_cosine": 0.9}, "`reference`"),
        ({"texts": ("a",), "per_token": True, "reference": "b"}, "one vector for a text"),
    ],
)
def test_wrong_values_are_one_line(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(WrongUseError, match=reason) as caught:
        Embed.of(**fields)
    assert "\n" not in str(caught.value)


def test_a_wrong_key_of_a_plan_is_named() -> None:
    with pytest.raises(ValueError, match="texst"):
        from_json('{"kind": "embed", "texst": ["a"]}')
