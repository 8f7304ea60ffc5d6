"""Options of a build as one mapping: those of its stages, and the attributes of the builder.

Command line, options files and plans set them by the same dotted keys:

    arn_cl_options.context_length: 192
    speculative_config.draft_model_path: draft_model.onnx
    attached_builders: [{arn: 1, model_path: decode.onnx}]
    op_packages: [{name: Scale, interface_provider: ScaleProvider, targets: {x86_64: libScale.so}}]
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from buildlib.builder.build_options import by_dotted_keys
from buildlib.builder.lora_config import LoraBuilderInputConfig
from buildlib.builder.speculative_config import SPECULATIONS
from buildlib.container.op_packages import KEY as OP_PACKAGES
from buildlib.errors import InvalidOptionError, UnknownOptionError
from buildlib.genai import GenAIBuilderHTP
from buildlib.paths import user_path
from buildlib.validation import first_fault

_TARGETS, _ATTACHED = "targets", "attached_builders"


def _takes_path(kind: object) -> bool:
    return kind is Path or any(map(_takes_path, get_args(kind)))


_PATHS = frozenset(
    f"{section}.{name}"
    for section, models in (
        ("lora_config", [LoraBuilderInputConfig]),
        ("speculative_config", SPECULATIONS.values()),
    )
    for model in models
    for name, field in model.model_fields.items()
    if _takes_path(field.annotation)
)


class AttachedModel(BaseModel):
    """Arguments of `attach_model_for_arn`, and options of the child."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    arn: Annotated[int, Field(ge=1)]
    model_path: Path
    encodings_path: Path | None = None
    name: str | None = None
    options: Mapping[str, object] = Field(default_factory=dict)


class _Properties(BaseModel):
    """Properties of the builder that stand for several options, and its attached models."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    multi_graph: bool = False
    weight_sharing: bool = True
    native_kv: bool = False
    parallel_build: bool = True
    attached_builders: tuple[AttachedModel, ...] = ()


PROPERTIES = tuple(_Properties.model_fields)


SHORT_NAMES: Mapping[str, str] = {
    "ar": "arn_cl_options.auto_regression_number",
    "cl": "arn_cl_options.context_length",
    "splits": "split_model.num_splits",
    "recipe": "quantization.recipe",
    "max_kl": "max_kl",
    "lora": "lora_config.lora_config_path",
    "embedding_lut": "prepare_embedding_lut",
}
"""Options by the names that they have on the command line and in plans."""


def named_options(given: Mapping[str, object]) -> dict[str, object]:
    """Return the options that are given by short names, under their dotted keys."""
    values = {SHORT_NAMES[name]: given[name] for name in SHORT_NAMES.keys() & given.keys()}
    values = {key: value for key, value in values.items() if value is not None}
    return {key: str(one) if isinstance(one, Path) else one for key, one in values.items()}


def flatten_options(values: Mapping[str, object], folder: Path) -> dict[str, object]:
    """Return options under dotted keys; values may stand in nested mappings.

    Args:
        values: by dotted keys, or by sections.
        folder: that relative paths are relative to.
    """
    return move_paths(dict(by_dotted_keys(values)), lambda path: str(folder / user_path(path)))


def move_paths(options: Mapping[str, object], move: Callable[[str], str]) -> dict[str, object]:
    """Return options under dotted keys with other paths.

    Args:
        options: by dotted keys.
        move: gives the new path for one.
    """
    return {key: _moved(key, value, move) for key, value in options.items()}


def _moved(key: str, value: object, move: Callable[[str], str]) -> object:
    if key in _PATHS and isinstance(value, str):
        return move(value)
    if key in {_ATTACHED, OP_PACKAGES} and isinstance(value, list | tuple):
        return [_with_paths_moved(entry, move) for entry in value]
    return value


def apply_options(builder: GenAIBuilderHTP, options: Mapping[str, object]) -> None:
    """Set options of any stage, and attributes of the builder, by dotted keys.

    `speculative_config.type` is Genie's name of the dialog: `lade`, `spd`, `ssd-q1`, `eaglet`; it
    can be left out where a key tells.
    """
    try:
        properties = _Properties.model_validate(
            {key: value for key, value in options.items() if key in _Properties.model_fields}
        )
    except ValidationError as error:
        fault = first_fault(error, _Properties)
        raise InvalidOptionError(fault.key, fault.reason, ()) from error
    try:
        builder.set_options(
            {key: value for key, value in options.items() if key not in _Properties.model_fields}
        )
    except UnknownOptionError as error:
        keys = (*error.options, *_Properties.model_fields)
        raise UnknownOptionError(error.key, keys) from error
    for name in properties.model_fields_set - {_ATTACHED}:
        setattr(builder, name, getattr(properties, name))
    for one in properties.attached_builders:
        child = builder.attach_model_for_arn(one.arn, one.model_path, one.encodings_path, one.name)
        child.set_options(flatten_options(one.options, Path()))


def _with_paths_moved(entry: object, move: Callable[[str], str]) -> object:
    if not isinstance(entry, Mapping):
        return entry

    def moved(key: str, value: object) -> object:
        if key == _TARGETS and isinstance(value, Mapping):
            return {target: moved("library", path) for target, path in value.items()}
        is_path = key in {"model_path", "encodings_path", "library"} and isinstance(value, str)
        return move(str(value)) if is_path else value

    return {key: moved(key, value) for key, value in entry.items()}
