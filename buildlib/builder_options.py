"""Options of a build as one mapping: those of its stages, and the attributes of the builder.

Command line, options files and plans set them by the same dotted keys:

    arn_cl_options.context_length: 192
    speculative_config.draft_model_path: draft_model.onnx
    attached_builders: [{arn: 1, model_path: decode.onnx}]
    op_packages: [{name: Scale, interface_provider: ScaleProvider, targets: {x86_64: libScale.so}}]
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from buildlib.container.op_packages import KEY as OP_PACKAGES
from buildlib.container.op_packages import OpPackage
from buildlib.embedding.config import EmbedDatatype
from buildlib.errors import InvalidOptionError, UnknownOptionError
from buildlib.genai import GenAIBuilderHTP
from buildlib.lora.config import LoraBuilderInputConfig
from buildlib.paths import user_path
from buildlib.pipeline.options import by_dotted_keys
from buildlib.speculative.config import (
    EagletBuilderConfig,
    LadeBuilderConfig,
    SpdBuilderConfig,
    SpeculativeConfig,
    SsdBuilderConfig,
)
from buildlib.validation import first_fault

_TARGETS = "targets"
_LORA, _SPECULATIVE, _ATTACHED = "lora_config", "speculative_config", "attached_builders"
_SPECULATIONS: Mapping[str, type[SpeculativeConfig]] = {
    "lade": LadeBuilderConfig,
    "spd": SpdBuilderConfig,
    "ssd-q1": SsdBuilderConfig,
    "eaglet": EagletBuilderConfig,
}
_SECTION_KEYS = (
    *(f"{_LORA}.{name}" for name in LoraBuilderInputConfig.model_fields),
    f"{_SPECULATIVE}.type",
    *dict.fromkeys(
        f"{_SPECULATIVE}.{name}" for kind in _SPECULATIONS.values() for name in kind.model_fields
    ),
)
_PATHS = frozenset(
    (
        f"{_LORA}.lora_config_path",
        f"{_SPECULATIVE}.draft_container",
        f"{_SPECULATIVE}.ssd_tensor_file",
        f"{_SPECULATIVE}.draft_model_path",
        f"{_SPECULATIVE}.draft_token_map",
    )
)


class AttachedModel(BaseModel):
    """Arguments of `attach_model_for_arn`, and options of the child."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    arn: Annotated[int, Field(ge=1)]
    model_path: Path
    encodings_path: Path | None = None
    name: str | None = None
    options: Mapping[str, object] = Field(default_factory=dict)


class _Attributes(BaseModel):
    """Attributes of the builder that hold one value."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prepare_embedding_lut: bool = False
    embedding_datatype: EmbedDatatype = "uint16"
    skip_ar_conversion: bool = False
    multi_graph: bool = False
    weight_sharing: bool = True
    native_kv: bool = False
    parallel_build: bool = True
    max_workers: Annotated[int, Field(ge=1)] | None = None
    attached_builders: tuple[AttachedModel, ...] = ()
    op_packages: tuple[OpPackage, ...] = ()


def flatten_options(values: Mapping[str, object], folder: Path) -> dict[str, object]:
    """Return options under dotted keys, whose values may stand in nested mappings.

    Args:
        values: by dotted keys, or by sections.
        folder: that relative paths are relative to.
    """
    return {key: _absolute(key, value, folder) for key, value in by_dotted_keys(values)}


def _absolute(key: str, value: object, folder: Path) -> object:
    """Return a value whose relative paths are relative to a folder."""
    if key in _PATHS and isinstance(value, str):
        return str(folder / user_path(value))
    if key in {_ATTACHED, OP_PACKAGES} and isinstance(value, list | tuple):
        return [_with_absolute_paths(entry, folder) for entry in value]
    return value


def apply_options(builder: GenAIBuilderHTP, options: Mapping[str, object]) -> None:
    """Set options of any stage, and attributes of the builder, by dotted keys.

    `speculative_config.type` is Genie's name of the dialog: `lade`, `spd`, `ssd-q1`, `eaglet`; it
    can be left out where a key tells.

    Raises:
        InvalidOptionError: a key that does not exist, or a value that it cannot take.
        ModelNotFoundError: there is no model to attach.
    """
    sections: dict[str, dict[str, object]] = {_LORA: {}, _SPECULATIVE: {}}
    attributes: dict[str, object] = {}
    for key, value in options.items():
        section, _, name = key.partition(".")
        if key in _SECTION_KEYS:
            sections[section][name] = value
        elif key in _Attributes.model_fields:
            attributes[key] = value
        else:
            _set_option(builder, key, value)
    if sections[_LORA]:
        builder.lora_config = LoraBuilderInputConfig.create(**sections[_LORA])
    if sections[_SPECULATIVE]:
        builder.speculative_config = speculation_of(sections[_SPECULATIVE])
    _set_attributes(builder, attributes)


def _set_option(builder: GenAIBuilderHTP, key: str, value: object) -> None:
    try:
        builder.set_options({key: value})
    except UnknownOptionError as error:
        known = (*error.options, *_Attributes.model_fields, *_SECTION_KEYS)
        raise UnknownOptionError(key, known) from error


def _set_attributes(builder: GenAIBuilderHTP, values: Mapping[str, object]) -> None:
    try:
        attributes = _Attributes.model_validate(values)
    except ValidationError as error:
        fault = first_fault(error, _Attributes)
        raise InvalidOptionError(fault.key, fault.reason, ()) from error
    for name in values:
        if name != _ATTACHED:
            setattr(builder, name, getattr(attributes, name))
    for one in attributes.attached_builders:
        child = builder.attach_model_for_arn(one.arn, one.model_path, one.encodings_path, one.name)
        child.set_options(flatten_options(one.options, Path()))


def speculation_of(values: Mapping[str, object]) -> SpeculativeConfig:
    """Return the configuration of speculative decoding that keys of `speculative_config` make.

    Raises:
        InvalidOptionError: a key that does not exist or is missing, or a value it cannot take.
    """
    key, given = f"{_SPECULATIVE}.type", dict(values)
    kind = given.pop("type", None) or _kind_of(given)
    if kind is None:
        raise InvalidOptionError(key, "it is missing", tuple(_SPECULATIONS))
    model = _SPECULATIONS.get(str(kind))
    if model is None:
        raise InvalidOptionError(key, f"there is no {kind!r}", tuple(_SPECULATIONS))
    try:
        return model.model_validate(given)
    except ValidationError as error:
        fault = first_fault(error, model)
        reason = f"{fault.reason} (of {kind})"
        raise InvalidOptionError(f"{_SPECULATIVE}.{fault.key}", reason, ()) from error


def _kind_of(given: Mapping[str, object]) -> str | None:
    """Return the kind that one of these keys is required by: each kind but `lade` needs a file."""
    for kind, model in _SPECULATIONS.items():
        if any(field.is_required() and name in given for name, field in model.model_fields.items()):
            return kind
    return None


def _with_absolute_paths(entry: object, folder: Path) -> object:
    if not isinstance(entry, Mapping):
        return entry

    def absolute(key: str, value: object) -> object:
        if key == _TARGETS and isinstance(value, Mapping):
            return {target: absolute("library", path) for target, path in value.items()}
        is_path = key in {"model_path", "encodings_path", "library"} and isinstance(value, str)
        return str(folder / user_path(str(value))) if is_path else value

    return {key: absolute(key, value) for key, value in entry.items()}
