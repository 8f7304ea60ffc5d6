"""Base of the typed configurations: vendor's keys outside, Python names inside, nothing unknown."""

import json
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_snake

from buildlib.errors import GenieConfigError
from buildlib.validation import first_fault

_MAX_BYTES = 4 * 1024 * 1024

Version = Literal[1]
Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=0)]


def kebab(name: str) -> str:
    """`max_num_tokens` as Genie writes it: `max-num-tokens`."""
    return to_snake(name).replace("_", "-")


class ConfigModel(BaseModel):
    """Immutable, and refuses keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def to_json(self) -> str:
        """Text with the vendor's keys in the order of the fields, without what is not set."""
        values = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return json.dumps(values, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, path: str = "configuration") -> Self:
        """Read a configuration; `path` is what errors call it.

        Raises:
            GenieConfigError: not JSON, an unknown key, or a value of the wrong kind.
        """
        try:
            return cls.model_validate_json(text, strict=True)
        except ValidationError as error:
            raise GenieConfigError(path, str(first_fault(error, cls))) from error

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a configuration from a file.

        Raises:
            GenieConfigError: as `from_json`, or the file cannot be read.
        """
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise GenieConfigError(str(path), f"larger than {_MAX_BYTES} bytes")
            text = path.read_bytes()
        except OSError as error:
            raise GenieConfigError(str(path), error.strerror or str(error)) from error
        return cls.from_json(text, str(path))


class GenieModel(ConfigModel):
    """A block of a Genie configuration: its keys are in kebab case."""

    model_config = ConfigDict(alias_generator=kebab)
