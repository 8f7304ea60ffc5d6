"""The options of one builder, as they were set."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from buildlib.errors import InvalidOptionError
from buildlib.pipeline.options import ConversionConfig, ModelTransformerConfig
from buildlib.targets import Target
from buildlib.toolchains.base import CompileConfig
from buildlib.toolchains.htp_extensions import HtpConfigHelper

GRAPH_OPTIONS = "graphs."
"""Compilation options of single graphs; all others are of a whole binary or build."""


COMPILATION_SECTIONS = frozenset({"context", "devices", "graphs", "groupContext", "memory"})


@dataclass(frozen=True)
class OptionSets:
    """What a user has set, by dotted keys; the rest has its default.

    Attributes:
        compilation: kept as set, because its defaults depend on the target.
    """

    transformation: ModelTransformerConfig = field(default_factory=ModelTransformerConfig)
    conversion: ConversionConfig = field(default_factory=ConversionConfig)
    compilation: Mapping[str, object] = field(default_factory=dict)

    def with_transformation(self, options: Mapping[str, object]) -> "OptionSets":
        """A copy with these set.

        Raises:
            InvalidOptionError: a key that does not exist, or a value it cannot take.
        """
        return replace(self, transformation=self.transformation.with_options(options))

    def with_conversion(self, options: Mapping[str, object]) -> "OptionSets":
        """As `with_transformation`."""
        return replace(self, conversion=self.conversion.with_options(options))

    def with_compilation(self, options: Mapping[str, object]) -> "OptionSets":
        """As `with_transformation`; a value may still turn out not to fit the target."""
        known = HtpConfigHelper.list_config_options()
        for key in options:
            if key not in known:
                raise InvalidOptionError(key, "no such option", known)
        return replace(self, compilation={**self.compilation, **options})

    def as_options(self) -> dict[str, object]:
        """Everything under its dotted key; of compilation, what was set."""
        return {
            **self.transformation.as_options(),
            **self.conversion.as_options(),
            **self.compilation,
        }

    def with_option(self, key: str, value: object) -> "OptionSets":
        """A copy with one option set, of whichever stage.

        Raises:
            InvalidOptionError: a key that does not exist, or a value it cannot take.
        """
        section = key.partition(".")[0]
        if section in COMPILATION_SECTIONS:
            return self.with_compilation({key: value})
        if section in type(self.conversion).model_fields:
            return self.with_conversion({key: value})
        return self.with_transformation({key: value})

    def compile_config(self, target: Target) -> CompileConfig:
        """All compilation options for a target.

        Raises:
            InvalidOptionError: a value that the target cannot have.
        """
        return CompileConfig.for_target(target).with_options(self.compilation)
