"""`LoraBuilderInputConfig`: the adapters and use cases of a container."""

from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from buildlib.error_base import one_line
from buildlib.errors import InvalidOptionError, ModelFileError
from buildlib.graph import interface
from buildlib.validation import first_fault

MAX_STRENGTH = 2.0
"""Strengths of an adapter are 0 to this: the graph's input has a grid."""

ADAPTER_CONFIG = "adapter_config.json"
BEYOND_FILE = "beyond_ranges.json"
"""Use cases that the encodings do not cover, and how far they leave them, beside the adapters."""
_MAX_BYTES = 1 << 20

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Weight = Annotated[float, Field(allow_inf_nan=False)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LoraBuilderInputConfig(_Model):
    """The builder's `lora_config`.

    Names: `qairt.modules.lora.lora_config`, docs.qualcomm.com 80-87189-2 (`lora_tutorial`).

    Attributes:
        lora_config_path: a YAML or JSON file of `LoraSet`, a PEFT folder, or a folder of those.
        create_lora_graph: add the branches; False when the ONNX has them already.
        quant_updatable_mode: encodings that the adapters decide: `all`, which then cover the model
            with each of them and without any, or `adapter_only`, those of the branches alone.
        alpha_tensor_name: the input that scales the active adapter.
        lora_version: 1 has adapters as inputs of the graph; later ones as sections of the context
            binary, which this toolchain cannot write.
    """

    lora_config_path: Path
    create_lora_graph: bool = True
    quant_updatable_mode: Literal["adapter_only", "all"] = "all"
    alpha_tensor_name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = "lora_alpha"
    lora_version: int = 1

    @classmethod
    def create(cls, **values: object) -> Self:
        """Construct and validate, with the builder's own error."""
        try:
            config = cls.model_validate(values)
        except ValidationError as error:
            fault = first_fault(error, cls)
            key = f"lora_config.{fault.key}"
            raise InvalidOptionError(key, fault.reason, tuple(cls.model_fields)) from error
        if config.lora_version != 1:
            reason = (
                f"{config.lora_version} keeps adapters as sections of the context binary, which "
                "onnxruntime-qnn cannot write, and the QAIRT SDK makes from files that are not "
                "documented whole; use 1"
            )
            raise InvalidOptionError("lora_config.lora_version", reason, ())
        if interface.LORA not in config.alpha_tensor_name:
            reason = "Genie knows an adapter's inputs by 'lora' in their names"
            raise InvalidOptionError("lora_config.alpha_tensor_name", reason, ())
        return config


class AdapterFolder(_Model):
    """A PEFT folder and its name; the path is relative to the file that names it."""

    name: Name
    path: Path


class UseCase(_Model):
    """A mix that can be activated at run time: adapters, each times its weight."""

    name: Name
    adapters: Annotated[dict[Name, Weight], Field(min_length=1)]


class LoraSet(_Model):
    """All adapters and use cases; without use cases each adapter is one, at weight 1."""

    adapters: Annotated[tuple[AdapterFolder, ...], Field(min_length=1)]
    use_cases: tuple[UseCase, ...] = ()

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [adapter.name for adapter in self.adapters]
        cases = [case.name for case in self.use_cases]
        for group in (names, cases):
            twice = next((name for name in group if group.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"{twice!r} stands twice")
        unknown = {name for case in self.use_cases for name in case.adapters} - set(names)
        if unknown:
            raise ValueError(f"a use case names {min(unknown)!r}, which is not an adapter")
        return self

    @property
    def cases(self) -> tuple[UseCase, ...]:
        """The use cases, or one for each adapter."""
        return self.use_cases or tuple(
            UseCase(name=adapter.name, adapters={adapter.name: 1.0}) for adapter in self.adapters
        )

    def files(self) -> dict[str, Path]:
        """Return every file that the adapters are read from, by adapter and name."""
        return {
            f"{adapter.name}/{path.name}": path
            for adapter in self.adapters
            for path in sorted(adapter.path.glob("adapter_*"))
        }

    @classmethod
    def load(cls, path: Path) -> "LoraSet":
        """Read the file or folder of `lora_config_path`; paths come back absolute."""
        if path.is_dir():
            folders = [path]
            if not (path / ADAPTER_CONFIG).is_file():
                folders = sorted(entry.parent for entry in path.glob(f"*/{ADAPTER_CONFIG}"))
            if not folders:
                raise ModelFileError(path, f"no folder in it has an {ADAPTER_CONFIG}")
            data: object = {"adapters": [{"name": f.name, "path": str(f)} for f in folders]}
            return _validated(path, data)
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise ModelFileError(path, f"larger than {_MAX_BYTES} bytes")
            data = _parse(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelFileError(path, error.strerror or "cannot be read") from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ModelFileError(path, f"not valid YAML ({one_line(str(error), 120)})") from error
        description = _validated(path, data)

        adapters = (
            a.model_copy(update={"path": path.parent / a.path}) for a in description.adapters
        )
        return description.model_copy(update={"adapters": tuple(adapters)})


def _parse(text: str) -> object:
    """Parse YAML, of which JSON is a part; a few bytes of aliases could stand for any amount."""
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
        raise ValueError("aliases are not read")
    return yaml.safe_load(text)


def _validated(path: Path, data: object) -> LoraSet:
    try:
        return LoraSet.model_validate(data)
    except ValidationError as error:
        raise ModelFileError(path, str(first_fault(error, LoraSet))) from error
