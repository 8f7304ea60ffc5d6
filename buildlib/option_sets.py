"""Options that a user has set: of a build in its three sets, and of the graphs of one AR alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from buildlib.errors import InvalidOptionError, UnknownOptionError
from buildlib.pipeline.options import ConversionConfig, MhaConfig, ModelTransformerConfig
from buildlib.pipeline.sources import OnnxSource, check_start_points
from buildlib.targets import Target, parse_target
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.htp_extensions import HtpConfigHelper

_GRAPH_OPTIONS = "graphs."
"""Compilation options of single graphs; all others are of a whole binary or build."""
_MHA_OPTIONS = "mha2sha."
_COMPILATION_SECTIONS = frozenset({"context", "devices", "graphs", "groupContext", "memory"})


@dataclass(frozen=True)
class OptionSets:
    """Options that the user has set, by dotted keys; all others have their defaults.

    Attributes:
        compilation: kept as set, because its defaults depend on the target.
    """

    transformation: ModelTransformerConfig = field(default_factory=ModelTransformerConfig)
    conversion: ConversionConfig = field(default_factory=ConversionConfig)
    compilation: Mapping[str, object] = field(default_factory=dict)

    def with_transformation(self, options: Mapping[str, object]) -> "OptionSets":
        """Return a copy with these set.

        Raises:
            InvalidOptionError: a key that does not exist, or a value it cannot take.
        """
        return replace(self, transformation=self.transformation.with_options(options))

    def with_conversion(self, options: Mapping[str, object]) -> "OptionSets":
        """Return a copy with options of the conversion set; see `with_transformation`."""
        return replace(self, conversion=self.conversion.with_options(options))

    def with_compilation(self, options: Mapping[str, object]) -> "OptionSets":
        """Return a copy with options of the compiler set; the target may still refuse a value."""
        known = HtpConfigHelper.list_config_options()
        for key in options:
            if key not in known:
                raise UnknownOptionError(key, known)
        return replace(self, compilation={**self.compilation, **options})

    def as_options(self) -> dict[str, object]:
        """Return all options under their dotted keys; of compilation, those that were set."""
        return {
            **self.transformation.as_options(),
            **self.conversion.as_options(),
            **self.compilation,
        }

    def with_option(self, key: str, value: object) -> "OptionSets":
        """Return a copy with one option of any stage set.

        Raises:
            InvalidOptionError: a key that does not exist, or a value it cannot take.
        """
        section = key.partition(".")[0]
        if section in _COMPILATION_SECTIONS:
            return self.with_compilation({key: value})
        if section in type(self.conversion).model_fields:
            return self.with_conversion({key: value})
        return self.with_transformation({key: value})

    def compile_config(self, target: Target) -> CompileConfig:
        """Return all compilation options for a target.

        Raises:
            InvalidOptionError: a value that the target cannot have.
        """
        return CompileConfig.for_target(target).with_options(self.compilation)


class AttachedBuilder:
    """The builder of one AR's graphs, from an export of their own; the rest is its parent's."""

    __slots__ = ("_own", "_set", "_targets", "name", "source")

    def __init__(self, name: str, source: OnnxSource) -> None:
        self.name = name
        self.source = source
        self._own = OptionSets()
        self._set: dict[str, object] = {}
        self._targets: tuple[Target, ...] = ()

    def set_targets(self, targets: Sequence[str]) -> Self:
        """Name the target again; it shares weights with its parent, and so must its target.

        Raises:
            UnknownSocError: the catalog has no such SoC.
        """
        self._targets = tuple(map(parse_target, targets))
        return self

    def set_options(self, options: Mapping[str, object]) -> Self:
        """Set options by dotted keys; only `graphs.*` and `mha2sha.*` may differ from the parent's.

        Raises:
            InvalidOptionError: a key that does not exist, or a value it cannot take.
        """
        for key, value in options.items():
            self._own = self._own.with_option(key, value)
            self._set[key] = self._own.as_options()[key]
        return self

    set_transformation_options = set_options
    set_conversion_options = set_options
    set_compilation_options = set_options

    @property
    def graph_options(self) -> Mapping[str, object]:
        """Options of these graphs alone."""
        return {key: value for key, value in self._set.items() if key.startswith(_GRAPH_OPTIONS)}

    @property
    def sets_mha2sha(self) -> bool:
        """True if its attention is taken apart as it says itself."""
        return any(key.startswith(_MHA_OPTIONS) for key in self._set)

    def mha_config(self, parent: OptionSets) -> MhaConfig:
        """Return options that take attention apart: the parent's where it has none itself."""
        own = {key: value for key, value in self._set.items() if key.startswith(_MHA_OPTIONS)}
        return parent.transformation.with_options(own).mha2sha

    def check(self, parent: OptionSets, targets: Sequence[Target]) -> None:
        """Check that only `graphs.*` and `mha2sha.*` differ from the parent.

        Args:
            parent: its options.
            targets: the parent's, which decide the defaults.

        Raises:
            InvalidOptionError: names what does, or an operator that its ONNX has not.
        """
        if self._targets and self._targets != tuple(targets):
            named = ", ".join(map(str, self._targets))
            wanted = ", ".join(map(str, targets))
            reason = (
                f"the attached builder {self.name} has {named}; its parent has {wanted or 'none'}"
            )
            raise InvalidOptionError("targets", reason, ())
        inherited: dict[str, object] = {}
        for target in targets:
            inherited |= parent.compile_config(target).as_options()
        inherited |= parent.as_options()
        for key, value in self._set.items():
            own = key.startswith((_GRAPH_OPTIONS, _MHA_OPTIONS))
            if not own and inherited.get(key) != value:
                reason = (
                    f"the attached builder {self.name} differs from its parent; "
                    f"it may set {_GRAPH_OPTIONS}* and {_MHA_OPTIONS}* alone"
                )
                raise InvalidOptionError(key, reason, ())
        check_start_points(self.mha_config(parent), self.source)
