"""Every key of a plan is read by what runs it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import harness
import plugins
import suites
from buildlib.builder_options import SHORT_NAMES
from buildlib.validation import without_effect
from harness.plans.plan_file import Plan

_HERE = "plan_file.py"
_READ = re.compile(r"\.(\w+)\b(?! = )")


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:  # noqa: ANN401
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for one in annotation.model_fields.values():
            yield from models_in(one.annotation)
    for one in get_args(annotation):
        yield from models_in(one)


def names_read() -> set[str]:
    """Return the attributes that are read outside of the plan's file, in other classes too."""
    roots = (Path(next(iter(package.__path__))) for package in (harness, plugins, suites))
    paths = (path for root in roots for path in root.rglob("*.py") if path.name != _HERE)
    return {name for path in paths for name in _READ.findall(path.read_text("utf-8"))}


@pytest.mark.needs("plugins.nightly")
def test_every_key_of_a_plan_is_read() -> None:
    read = names_read() | SHORT_NAMES.keys()
    silent = {
        f"{model.__name__}.{name}"
        for model in models_in(Plan)
        for name in model.model_fields
        if name not in read
    }
    assert silent == {f"{Plan.__name__}.{key}" for key, _ in without_effect(Plan)}
