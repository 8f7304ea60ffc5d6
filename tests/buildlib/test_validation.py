"""Faults that pydantic finds reach users in our words."""

from typing import Annotated, Literal, get_args

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, core_schema

from buildlib.validation import first_fault, reason_for


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    bits: Literal[4, 8] = 8
    n_threads: Annotated[int, Field(ge=1, le=6)] = Field(1, alias="n-threads")
    names: tuple[str, ...] = ()
    sizes: tuple[Annotated[int, Field(ge=1)], ...] = ()


class Whole(BaseModel):
    model_config = ConfigDict(extra="forbid")

    parts: list[Part] = []
    by_name: dict[str, Part] = {}
    label: Annotated[str, Field(min_length=2, max_length=5, pattern="^[a-z]+$")] = "ab"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"parts": [{}, {"bits": 5}]}, "/parts/1/bits: must be 4 or 8, not 5"),
        ({"parts": [{"bit": 4}]}, "/parts/0/bit: unknown key: did you mean bits?"),
        ({"parts": [{"n-thread": 4}]},
         "/parts/0/n-thread: unknown key: did you mean n-threads?"),
        ({"parts": [{"n-threads": 7}]}, "/parts/0/n-threads: must be at most 6, not 7"),
        ({"parts": [{"n-threads": "x"}]}, "/parts/0/n-threads: must be a whole number"),
        ({"parts": [{"names": 1}]}, "/parts/0/names: must be a list of texts"),
        ({"parts": [{"sizes": 1}]}, "/parts/0/sizes: must be a list of whole numbers"),
        ({"parts": 1}, "/parts: must be a list"),
        ({"by_name": {"a/b~c": {"bits": "four" * 100}}}, "/by_name/a~1b~0c/bits: must be 4 or 8"),
        ({"label": "a"}, "/label: must have at least 2 characters"),
        ({"label": "A!"}, "/label: must match pattern ^[a-z]+$"),
        ({"lable": "a"}, "/lable: unknown key: did you mean label?"),
        (3, "must be a mapping of keys"),
    ],
)  # fmt: skip
def test_a_fault_says_where_and_what_is_allowed(values: object, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Whole.model_validate(values)
    told = str(first_fault(caught.value, Whole))
    assert told.startswith(said)
    assert len(told) < 120


def test_no_json_is_said_to_be_none() -> None:
    with pytest.raises(ValidationError) as caught:
        Whole.model_validate_json("{")
    assert str(first_fault(caught.value)).startswith("it is not valid JSON: ")


@pytest.mark.parametrize("kind", get_args(core_schema.ErrorType))
def test_pydantics_words_never_show(kind: str) -> None:
    found = ErrorDetails(
        type=kind,
        loc=("key",),
        msg="Input should be a valid integer",
        input=0,
        ctx={"tag": "x", "expected_tags": "y"},
    )
    told = reason_for(found)
    assert told
    assert not any(word in told for word in ("Input", "should"))
