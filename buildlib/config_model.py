"""Base of the typed configurations: vendor's keys outside, Python names inside, nothing unknown."""

import codecs
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.alias_generators import to_snake
from pydantic_core import (
    CoreSchema,
    InitErrorDetails,
    PydanticCustomError,
    PydanticKnownError,
    core_schema,
)

from buildlib.errors import InputFileError
from buildlib.validation import ARRAY, NULL, OBJECT, RULE, Fault, faults

_MAX_BYTES = 4 * 1024 * 1024
_INT32 = 2**31 - 1
INT64 = 2**63 - 1
_FLOAT32 = 3.402823466e38  # as Genie writes it, a little below the largest

WRITTEN = object()
"""Mark of a key that has a default in Python, and that a file must have."""
_FILE = object()
"""Context of a validation that reads the text of a file."""


def _whole(value: object) -> object:
    """Refuse `true` and `1.0` where 1 is allowed: in Python they are equal."""
    if isinstance(value, bool | float):
        raise PydanticKnownError("int_type")
    return value


Whole = BeforeValidator(_whole)
Version = Annotated[Literal[1], Whole, WRITTEN]
Count = Annotated[int, Field(ge=1, le=INT64)]
Size = Annotated[int, Field(ge=0, le=INT64)]
Count32 = Annotated[int, Field(ge=1, le=_INT32)]
Size32 = Annotated[int, Field(ge=0, le=_INT32)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Float32 = Annotated[float, Field(ge=-_FLOAT32, le=_FLOAT32, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
Texts = tuple[Text, ...]

One = Tag(OBJECT)
Several = Tag(ARRAY)


class _OneOrSeveral:
    """Annotation of a value that may stand alone or in an array: errors name the key alone."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = Discriminator(_form).__get_pydantic_core_schema__(source, handler)
        # Pydantic would call `_form` to write a value as well, and drop what is raised meanwhile:
        # a KeyboardInterrupt was lost.
        return cast("CoreSchema", {**schema, "serialization": core_schema.simple_ser_schema("any")})


def _form(value: object) -> str:
    return ARRAY if isinstance(value, list | tuple) else OBJECT


OneOrSeveral = _OneOrSeveral()


def in_file(info: ValidationInfo) -> bool:
    """Tell a validator whether it reads the text of a file, which says what it says."""
    return info.context is _FILE


def kebab(name: str) -> str:
    """Write `max_num_tokens` as Genie does: `max-num-tokens`."""
    return to_snake(name).replace("_", "-")


def refuse(reason: str, *location: str | int, kind: str = RULE) -> ValidationError:
    """Return the error of a rule between keys, for a validator to raise.

    Args:
        reason: the fault in one line.
        location: keys and indices that lead to it from the object that is validated.
        kind: of the fault.
    """
    template = "{reason}"  # noqa: RUF027 - pydantic fills it in
    error = PydanticCustomError(kind, template, {"reason": reason})
    return ValidationError.from_exception_data(
        "rule", [InitErrorDetails(type=error, loc=location, input=None)]
    )


class ConfigModel(BaseModel):
    """Immutable, and refuses keys that it does not know.

    Keys that a file does not have stay unset: `to_json` writes the text that `from_json` read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, defer_build=True)

    @model_validator(mode="after")
    def _file_is_complete(self, info: ValidationInfo) -> Self:
        if not in_file(info):
            return self
        for name, field in type(self).model_fields.items():
            key = field.alias or field.serialization_alias or name
            if WRITTEN in field.metadata and name not in self.model_fields_set:
                raise refuse("it is missing", key, kind="missing")
            if name in self.model_fields_set and getattr(self, name) is None:
                raise refuse("must not be null", key, kind=NULL)
        return self

    def to_json(self) -> str:
        """Return text with the vendor's keys in the order of the fields, without unset ones."""
        values = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return json.dumps(values, indent=2, ensure_ascii=False) + "\n"

    def notes(self) -> Iterator[Fault]:
        """Yield what is taken here, and has another effect than its reader may think."""
        yield from ()

    def remarks(self, *place: str | int) -> Iterator[Fault]:
        """Yield the notes of this object, which stands at a place, and of all objects in it."""
        yield from (replace(note, location=(*place, *note.location)) for note in self.notes())
        for name, field in type(self).model_fields.items():
            value, key = getattr(self, name), field.alias or field.serialization_alias or name
            several = isinstance(value, tuple)
            for index, inner in enumerate(value if several else (value,)):
                if isinstance(inner, ConfigModel):
                    yield from inner.remarks(*place, key, *((index,) if several else ()))

    @classmethod
    def from_json(cls, text: str | bytes, path: str = "configuration") -> Self:
        """Read a configuration; errors call it `path`."""
        try:
            return cls._read(text)
        except ValidationError as error:
            raise InputFileError(path, str(faults(error, cls)[0])) from error

    @classmethod
    def faults_of(cls, text: str | bytes) -> tuple[Fault, ...]:
        """Return all faults of a text; none if `from_json` reads it."""
        try:
            cls._read(text)
        except ValidationError as error:
            return faults(error, cls)
        return ()

    @classmethod
    def _read(cls, text: str | bytes) -> Self:
        text = text.encode() if isinstance(text, str) else text
        text = text.removeprefix(codecs.BOM_UTF8)
        repeated = _repeated_key(text)
        if repeated is not None:
            raise refuse(f"the key {repeated!r} stands twice in one object", kind="repeated")
        return cls.model_validate_json(
            text, strict=True, context=_FILE, by_alias=True, by_name=False
        )

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a configuration from a file."""
        return cls.from_json(read_config(path), str(path))


def _repeated_key(text: bytes) -> str | None:
    """Return the first key that an object has twice: one of its values would be lost."""
    repeats: list[str] = []

    def note(pairs: list[tuple[str, object]]) -> None:
        names = [name for name, _ in pairs]
        repeats.extend(name for name in dict.fromkeys(names) if names.count(name) > 1)

    try:
        json.loads(text, object_pairs_hook=note)
    except (ValueError, RecursionError):  # the model says what is wrong
        return None
    return repeats[0] if repeats else None


def read_config(path: Path) -> bytes:
    """Read the bytes of a configuration file."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InputFileError(str(path), f"larger than {_MAX_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise InputFileError(str(path), error.strerror or str(error)) from error


class GenieBlock(ConfigModel):
    """A block of a Genie configuration: its keys are in kebab case."""

    model_config = ConfigDict(alias_generator=kebab, defer_build=True)
