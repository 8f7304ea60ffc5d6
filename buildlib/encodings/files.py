"""Encodings files: load any known format and save one, with one-line errors for broken files."""

import json
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import from_json

from buildlib.encodings import aimet_1_0_0
from buildlib.encodings.json_fields import Json, MalformedError, shown
from buildlib.encodings.model import Encodings
from buildlib.entry_points import entry_modules, entry_names, load_entry
from buildlib.error_base import one_line
from buildlib.errors import EncodingsError
from buildlib.files import atomic_write_bytes, check_file
from buildlib.validation import first_fault

_MAX_FILE_BYTES = 1 << 30


OWN = "1.0.0"
"""AIMET's format that stages write and read."""
DOOR = "encodings"
"""Entry points of its other formats by their version: functions as `aimet_1_0_0.read`."""


def load_encodings(path: Path) -> Encodings:
    """Read and check an encodings file of any known format.

    Raises:
        EncodingsError: missing, not JSON, of an unknown version, or with grids that make no
            sense; names the tensor.
    """
    data = _parse(path)
    version = data.get("version") if isinstance(data, dict) else None
    known = sorted((OWN, *entry_names(DOOR)))
    if not isinstance(data, dict) or not isinstance(version, str) or version not in known:
        reason = f"its version is {shown(version)}; known are {', '.join(known)}"
        raise EncodingsError(str(path), reason)
    try:
        found: Encodings = (aimet_1_0_0.read if version == OWN else load_entry(DOOR, version))(data)
    except MalformedError as error:
        raise EncodingsError(str(path), str(error)) from error
    except ValidationError as error:
        raise EncodingsError(str(path), one_line(str(first_fault(error)))) from error
    return found


def format_modules() -> tuple[str, ...]:
    """Return the modules whose code decides how encodings of users are read."""
    return entry_modules(DOOR, entry_names(DOOR))


def save_encodings(encodings: Encodings, path: Path) -> Path:
    """Write an encodings file of format 1.0.0; the same encodings give the same bytes."""
    atomic_write_bytes(path, b"".join(aimet_1_0_0.write(encodings)))
    return path


def _parse(path: Path) -> object:
    try:
        check_file(path)
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise EncodingsError(str(path), "larger than any encodings file")
        text = path.read_bytes()
    except OSError as error:
        raise EncodingsError(str(path), error.strerror or "cannot be read") from error
    try:
        data = from_json(text, allow_inf_nan=False, cache_strings="keys")
    except (ValueError, RecursionError) as error:
        raise EncodingsError(str(path), f"not valid JSON ({shown(str(error))})") from error
    if isinstance(data, dict):
        _check_names(path, text, data)
    return data


def _check_names(path: Path, text: bytes, data: Json) -> None:
    """Refuse repeated names: they are keys in older formats, and a parser keeps only one."""
    groups = [data.get("activation_encodings"), data.get("param_encodings")]
    n_cells = sum(
        len(cells)
        for group in groups
        if isinstance(group, dict)
        for cells in group.values()
        if isinstance(cells, list)
    )
    if any(isinstance(group, dict) for group in groups) and text.count(b'"bitwidth"') != n_cells:
        try:
            json.loads(text, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise EncodingsError(str(path), one_line(str(error))) from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    by_name = dict(pairs)
    if len(by_name) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise MalformedError(f"{shown(twice)} has {names.count(twice)} encodings")
    return by_name
