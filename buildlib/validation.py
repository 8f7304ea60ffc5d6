"""Faults that pydantic finds, in our words: place, allowed values, and the nearest known key."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, core_schema

from buildlib.error_base import nearest_names, one_line

Location = Sequence[int | str]

MISSING = "missing"
RULE = "rule"
"""Kind of a fault between several keys."""
NULL = "null"
"""Kind of a value that is null where none is allowed."""
NO_SUCH_KEY = "extra_forbidden"
OBJECT, ARRAY = "(object)", "(array)"
"""Tags of the kinds of a union that differ in shape; no steps of a location."""
_TAG = "union_tag_invalid"
_LISTS = {"tuple_type", "list_type", "frozen_set_type", "set_type"}
_REASONS = {
    NO_SUCH_KEY: "unknown key",
    MISSING: "it is missing",
    "json_invalid": "it is not valid JSON: {error}",
    "json_type": "it is not valid JSON",
    "invalid_key": "its keys must be texts",
    "dict_type": "must be a mapping of keys",
    "mapping_type": "must be a mapping of keys",
    "model_type": "must be a mapping of keys",
    "model_attributes_type": "must be a mapping of keys",
    "dataclass_type": "must be a mapping of keys",
    "string_type": "must be a text",
    "string_unicode": "must be a text in UTF-8",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match pattern {pattern}",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a smaller number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "none_required": "must be empty",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "too_short": "must have {min_length} or more entries",
    "too_long": "must have {max_length} or fewer entries",
    "datetime_type": "must be a date with a time",
    "datetime_parsing": "must be a date with a time",
    "datetime_from_date_parsing": "must be a date with a time",
    "datetime_object_invalid": "must be a date with a time",
    "timezone_aware": "must say its timezone",
    "path_type": "must be a path",
    "value_error": "{error}",
    "assertion_error": "{error}",
    "union_tag_not_found": "{discriminator} is missing",
}
_ENTRIES = {str: " of texts", int: " of whole numbers", float: " of numbers"}
_OTHERWISE = "it cannot be used"
_SHOULD = re.compile(r"^.* should (?=be )")
_PYDANTICS = frozenset(get_args(core_schema.ErrorType))
_WITH_VALUE = {
    "literal_error", "enum", "greater_than", "greater_than_equal", "less_than", "less_than_equal",
    "int_type", "int_parsing", "int_from_float", "float_type", "float_parsing", "bool_type",
    "bool_parsing", "string_type",
}  # fmt: skip
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class FormerKey:
    """Annotation of a field: a name that documents give its key, and that is none any more."""

    name: str


@dataclass(frozen=True, slots=True)
class NoEffect:
    """Annotation of a field: why its values change nothing, after "no effect here, because".

    Attributes:
        toolchain: that it is true of, by its name in metadata; empty for any.
    """

    reason: str
    toolchain: str = ""

    def __str__(self) -> str:
        return f"no effect here, because {self.reason}"


def without_effect(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, NoEffect]]:
    """Yield the keys of a model, and of those within it, whose values change nothing."""
    for key, field in _fields(model).items():
        own = [(f"{prefix}{key}", one) for one in field.metadata if isinstance(one, NoEffect)]
        yield from own
        for inner in () if own else _models_in(field.annotation):
            yield from without_effect(inner, f"{prefix}{key}.")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        location: keys and indices that lead to the value from the outermost one.
        kind: pydantic's name of it.
        reason: the fault of the value.
    """

    location: tuple[int | str, ...]
    kind: str
    reason: str

    @property
    def pointer(self) -> str:
        """The location as a JSON pointer (RFC 6901); empty for the whole document."""
        steps = (str(step).replace("~", "~0").replace("/", "~1") for step in self.location)
        return "".join(f"/{step}" for step in steps)

    @property
    def key(self) -> str:
        """The location as a dotted key, without indices."""
        return ".".join(step for step in self.location if isinstance(step, str))

    def __str__(self) -> str:
        return one_line(f"{self.pointer}: {self.reason}" if self.location else self.reason)


def first_fault(error: ValidationError, model: type[BaseModel] | None = None) -> Fault:
    """Return the first fault; with the model that was validated, it names the nearest known key.

    An unknown key comes first: it may be one that is missing, misspelt.
    """
    return min(faults(error, model), key=lambda fault: fault.kind != NO_SUCH_KEY)


def faults(error: ValidationError, model: type[BaseModel] | None = None) -> tuple[Fault, ...]:
    """Return all faults, as `first_fault` gives the first."""
    return tuple(_fault(details, model) for details in error.errors(include_url=False))


def _fault(details: ErrorDetails, model: type[BaseModel] | None) -> Fault:
    reason, value = reason_for(details, model), details["input"]
    if details["type"] in _WITH_VALUE and isinstance(value, str | int | float):
        text = repr(value)
        reason += f", not {text if len(text) <= _SHOWN else f'{text[:_SHOWN]}...'}"
    location = tuple(step for step in details["loc"] if step not in {OBJECT, ARRAY})
    return Fault(location, details["type"], reason)


def reason_for(details: ErrorDetails, model: type[BaseModel] | None = None) -> str:
    """Describe the fault of a value, without naming the value."""
    kind, location, context = details["type"], details["loc"], details.get("ctx", {})
    if kind in _LISTS:
        return f"must be a list{_of_what(model, location)}"
    if kind == _TAG:
        return f"there is no kind {context['tag']!r}, but {context['expected_tags']}"
    if kind == NO_SUCH_KEY:
        models = _models_at(model, location[:-1])
        near = nearest_key(str(location[-1]), hints(models))
        return _REASONS[kind] + (f": did you mean {near}?" if near else "")
    if kind in _REASONS:
        return _REASONS[kind].format_map(
            _Context({name: f"{v:g}" if isinstance(v, float) else v for name, v in context.items()})
        )
    if kind not in _PYDANTICS:  # one of ours
        return details["msg"]
    return _SHOULD.sub("must ", details["msg"]) if " should be " in details["msg"] else _OTHERWISE


def nearest_key(given: str, hints: Mapping[str, str]) -> str | None:
    """Return the key that is nearest to an unknown one, in upper or lower case.

    Args:
        hints: each key, by the names that it has and had.
    """
    near = nearest_names(given, hints)
    return hints[near[0]] if near else None


def hints(models: Iterable[type[BaseModel]]) -> dict[str, str]:
    """Return the keys of models, each by the names that it has and had."""
    found: dict[str, str] = {}
    for key, field in (pair for model in models for pair in _fields(model).items()):
        found |= {former.name: key for former in field.metadata if isinstance(former, FormerKey)}
        found[key] = key
    return found


class _Context(dict[str, object]):
    def __missing__(self, key: str) -> object:
        return f"({key})"


def _models_at(model: type[BaseModel] | None, location: Location) -> list[type[BaseModel]]:
    """Return the models that a location may be of; of a union with kinds the one of its kind."""
    models = [] if model is None else [model]
    for step in location:
        if len(models) > 1 and (of_kind := [each for each in models if _kind(each) == step]):
            models = of_kind
        elif fields := [f for each in models if (f := _fields(each).get(str(step)))]:
            models = [inner for field in fields for inner in _models_in(field.annotation)]
    return models


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields by the keys that stand for them."""
    fields = model.model_fields.items()
    return {field.alias or field.serialization_alias or name: field for name, field in fields}


def _kind(model: type[BaseModel]) -> object:
    field = model.model_fields.get("kind")
    return None if field is None else field.default


def _of_what(model: type[BaseModel] | None, location: Location) -> str:
    """Return the entries of the list at a location in words; empty if models, or unknown."""
    fields = [_fields(each).get(str(location[-1])) for each in _models_at(model, location[:-1])]
    kinds = {kind for field in fields if field for kind in _plain_types(field.annotation)}
    return next((words for kind, words in _ENTRIES.items() if kind in kinds), "")


def _plain_types(annotation: object) -> Iterator[object]:
    yield annotation
    for argument in get_args(annotation):
        yield from _plain_types(argument)
