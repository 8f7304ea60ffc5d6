"""Key of a stage: everything that its output depends on, and the hash over it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel, TypeAdapter


@dataclass(frozen=True)
class StageKey:
    """Options, inputs and code that determine the output of a stage.

    Attributes:
        config: options of the stage: JSON values, mappings, sequences, paths, enumerations,
            dataclasses, pydantic models.
        source_hashes: of everything that it reads, in a fixed order.
        versions: of the toolchain, by name.
        code_sha256: of its code.
    """

    operation: str
    config: Mapping[str, object]
    source_hashes: Sequence[str]
    versions: Mapping[str, str] = field(default_factory=dict)
    code_sha256: str = ""

    def digest(self) -> str:
        """Compute the SHA-256 in hex; the order of options does not matter, that of sources does.

        Raises:
            TypeError: an option is nothing that JSON can hold.
            ValueError: an option is not a finite number.
        """
        parts = {
            "operation": self.operation,
            "config": plain_config(self.config),
            "sources": list(self.source_hashes),
            "versions": dict(self.versions),
            "code": self.code_sha256,
        }
        canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()


def combined_sha256(hashes: Mapping[str, str]) -> str:
    """Compute one hash over the names and the hashes of files, in any order."""
    lines = sorted(f"{name}\0{sha256}" for name, sha256 in hashes.items())
    return text_sha256("\n".join(lines))


def text_sha256(text: str) -> str:
    """Compute the SHA-256 of a text in UTF-8, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def plain_config(config: Mapping[str, object]) -> dict[str, Any]:
    """Return a configuration as JSON values, sorted by name."""
    text = json.dumps(config, sort_keys=True, allow_nan=False, default=_plain)
    values: dict[str, Any] = json.loads(text)
    return values


def _plain(value: object) -> object:
    match value:
        case BaseModel():
            return value.model_dump(mode="json")
        case Enum():
            return value.value
        case PurePath():
            return str(value)
        case Mapping():
            return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return TypeAdapter(type(value)).dump_python(value, mode="json")
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be part of a cache key")
