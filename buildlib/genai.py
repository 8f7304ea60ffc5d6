"""The Gen AI Builder: a model folder in, a `GenAIContainer` out, in one call.

The names are the vendor's ("Gen AI Builder Overview", docs.qualcomm.com 80-87189-2):

    builder = GenAIBuilderFactory.create("model_dir", cache_root="~/.cache/qnnfarm")
    builder.set_targets(["chipset:SM8750"])
    container = builder.build()
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar, cast

from buildlib.builder.additions import additions_of
from buildlib.builder.build import Build, Sources
from buildlib.builder.build_options import (
    COMPILATION,
    CONVERSION,
    SETS,
    TRANSFORMATION,
    BuildOptions,
    by_dotted_keys,
)
from buildlib.builder.lora_config import LoraBuilderInputConfig
from buildlib.builder.plan import BuildPlan
from buildlib.builder.runner import OnStage
from buildlib.builder.scheduler import default_workers
from buildlib.builder.sources import (
    ModelSource,
    OnnxSource,
    SourceFiles,
    architecture_of,
    attached_source,
    check_start_points,
    find_source,
    is_spread,
    layers_of,
    positions_of,
)
from buildlib.builder.speculative_config import SpeculativeConfig
from buildlib.builder.verification import verify_build
from buildlib.cache.layout import is_model_name
from buildlib.checkpoint.architectures import SupportedLLMs
from buildlib.container.container import GenAIContainer
from buildlib.container.op_packages import OpPackage
from buildlib.embedding.config import EmbedDatatype
from buildlib.entry_points import entry_names, load_entry
from buildlib.errors import InvalidOptionError, ModelWarning
from buildlib.numerics.comparison import VerificationReport
from buildlib.numerics.transformers import ReferenceEngine
from buildlib.numerics.verifier import OnComparison, VerifyOptions
from buildlib.paths import absolute_user_path, default_cache_root
from buildlib.targets import Target, parse_target
from buildlib.toolchains.base import Toolchain
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain

BACKEND_HTP = "HTP"

MULTI_GRAPH_CONTEXT_LENGTHS = (512, 1024, 2048, 3072, 4096)
"""Context lengths of a builder with `multi_graph`, as documented."""

_ARS = "arn_cl_options.auto_regression_number"
_LENGTHS = "arn_cl_options.context_length"
_WEIGHT_SHARING = "context.weight_sharing_enabled"
_GRAPH_OPTIONS, _MHA_OPTIONS = "graphs.", "mha2sha."
_CALIBRATION = tuple(
    f"quantization.{name}"
    for name in ("act_bitwidth", "activation_precision", "activation_ranges", "calibration_tokens")
)
_OWN = (_GRAPH_OPTIONS, _MHA_OPTIONS, *_CALIBRATION)
"""Beginnings of the options that an attached builder may have of its own: they leave the weights,
which its graphs share with its parent's, as they are."""


class BuilderModule(Protocol):
    """Entry point of `qnnfarm.builders`, which is a module: it builds what is no decoder."""

    def builds(self, source: ModelSource) -> bool:
        """Return whether a source is of its kind; an unreadable one is not."""

    def read_config(self, path: Path) -> Mapping[str, object] | None:
        """Read what a `config.json` of its kind says; None for one of another kind."""

    def plan_build(
        self,
        source: ModelSource,
        options: BuildOptions,
        compilation: CompileConfig,
        cache_root: Path,
        toolchain: Toolchain,
    ) -> Build:
        """Check the options of a builder, and return the build."""


def builders() -> Iterator[BuilderModule]:
    """Yield the builders of what is no decoder."""
    for name in entry_names("builders"):
        yield cast("BuilderModule", load_entry("builders", name))


def _find_builder(source: ModelSource) -> BuilderModule | None:
    return next((builder for builder in builders() if builder.builds(source)), None)


class GenAIBuilderFactory:
    """Factory of builders."""

    @classmethod
    def create(
        cls,
        pretrained_model_path: str | PathLike[str],
        backend_type: str = BACKEND_HTP,
        *,
        cache_root: str | PathLike[str] | None = None,
        tokenizer_path: str | PathLike[str] | None = None,
        config_path: str | PathLike[str] | None = None,
        config_dict: Mapping[str, Any] | None = None,
        encodings_path: str | PathLike[str] | None = None,
        calibration_text: str | None = None,
        toolchain: Toolchain | None = None,
    ) -> "GenAIBuilderHTP":
        """Return a builder for the model in a folder: a decoder, or the ONNX of a text encoder.

        Args:
            pretrained_model_path: a folder with ONNX and encodings, the ONNX file itself, or a
                checkpoint that is exported first: its folder, a GGUF, or an id of the hub.
            backend_type: `HTP`.
            cache_root: where stage outputs are kept; by default the user's cache folder.
            tokenizer_path: in place of the folder's `tokenizer.json`.
            config_path: in place of the folder's `config.json`.
            config_dict: the configuration itself, in place of a file.
            encodings_path: in place of the encodings beside the ONNX.
            calibration_text: for tensors without encodings; by default the text in the folder.
            toolchain: the compiler; by default the one from PyPI.

        Warns:
            ModelWarning: an ONNX is of no known family; a checkpoint of none is refused when built.

        Raises:
            ModelFileError: nothing in the folder can be built; or the configuration is no JSON
                object; or a checkpoint without text.
            InvalidOptionError: a backend other than HTP, or two configurations.
        """
        if backend_type != BACKEND_HTP:
            raise InvalidOptionError(
                "backend_type", f"{backend_type!r} is not built here", (BACKEND_HTP,)
            )
        if config_path is not None and config_dict is not None:
            raise InvalidOptionError("config_dict", "config_path is given as well; give one", ())
        text = None if config_dict is None else _json_of(config_dict)
        files = SourceFiles(_path(tokenizer_path), _path(config_path), text, _path(encodings_path))
        root = absolute_user_path(default_cache_root() if cache_root is None else cache_root)
        source = find_source(pretrained_model_path, calibration_text, files, cache_root=root)
        other = _find_builder(source) if architecture_of(source) is None else None
        if architecture_of(source) is None and other is None and isinstance(source, OnnxSource):
            families = ", ".join(SupportedLLMs)
            warnings.warn(
                f"{source.name} is of no known family ({families}): its graph and its config.json "
                "decide how it is built, if they can be read",
                ModelWarning,
                stacklevel=2,
            )
        return GenAIBuilderHTP(source, root, toolchain or _default_toolchain(), other)


_T = TypeVar("_T")


class _Option(Generic[_T]):
    """An attribute of a builder that is a field of `BuildOptions`, checked when it is set."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, builder: "GenAIBuilderHTP", owner: type) -> _T:
        return cast("_T", getattr(builder.options, self._name))

    def __set__(self, builder: "GenAIBuilderHTP", value: _T) -> None:
        builder.set_options({self._name: value})


class GenAIBuilderHTP:
    """Builds a model for the Hexagon tensor processor of one target.

    Set targets and options, then `build()`. `BuildOptions` explains the attributes.
    """

    # A misspelled attribute must not be an option that is silently ignored.
    __slots__ = (
        "_attached",
        "_cache_root",
        "_other",
        "_source",
        "_targets",
        "_toolchain",
        "options",
    )

    lora_config = _Option[LoraBuilderInputConfig | None]()
    speculative_config = _Option[SpeculativeConfig | None]()
    prepare_embedding_lut = _Option[bool]()
    embedding_datatype = _Option[EmbedDatatype]()
    skip_ar_conversion = _Option[bool]()
    op_packages = _Option[Sequence[OpPackage]]()
    max_kl = _Option[float | None]()
    max_workers = _Option[int | None]()

    def __init__(
        self,
        source: ModelSource,
        cache_root: Path,
        toolchain: Toolchain,
        other: BuilderModule | None = None,
    ) -> None:
        self._source = source
        self._other = other
        self._cache_root = cache_root
        self._toolchain = toolchain
        self._targets: tuple[Target, ...] = ()
        self.options = BuildOptions()
        self._attached: dict[int, AttachedBuilder] = {}

    def set_targets(self, targets: Sequence[str]) -> Self:
        """Name the SoC to build for: `chipset:SM8750`, `SM8750` or `SM8750:emulator`.

        Raises:
            BuildError: the catalog has no such SoC.
            InvalidOptionError: not exactly one; a container is for one target.
        """
        if isinstance(targets, str):
            raise InvalidOptionError("targets", f"it takes a list, such as [{targets!r}]", ())
        if len(targets) != 1:
            raise InvalidOptionError(
                "targets", f"a container is built for one target, not {len(targets)}", ()
            )
        self._targets = tuple(parse_target(target) for target in targets)
        return self

    def set_transformation_options(self, options: Mapping[str, object]) -> Self:
        """Set options by dotted keys: `arn_cl_options.context_length`, `split_model.num_splits`."""
        self.options = self.options.with_options(options, TRANSFORMATION)
        return self

    def set_conversion_options(self, options: Mapping[str, object]) -> Self:
        """Set options by dotted keys: `quantization.act_bitwidth`."""
        self.options = self.options.with_options(options, CONVERSION)
        return self

    def set_compilation_options(self, options: Mapping[str, object]) -> Self:
        """Set options by dotted keys: `graphs.vtcm_size_in_mb`, `context.weight_sharing_enabled`.

        `plan()` refuses options that target or toolchain cannot have.
        """
        self.options = self.options.with_options(options, COMPILATION)
        return self

    def set_options(self, options: Mapping[str, object]) -> Self:
        """Set options of any of the three sets above, or attributes.

        Raises:
            InvalidOptionError: a key that does not exist, or a value it cannot take.
        """
        self.options = self.options.with_options(options)
        return self

    @property
    def encodings_path(self) -> Path | None:
        """The encodings of the ONNX; those beside it unless another file was named."""
        return self._source.encodings if isinstance(self._source, OnnxSource) else None

    @encodings_path.setter
    def encodings_path(self, path: str | PathLike[str]) -> None:
        if not isinstance(self._source, OnnxSource):
            reason = "a checkpoint has no encodings; they are made by calibration"
            raise InvalidOptionError("encodings_path", reason, ())
        self._source = self._source.with_encodings(absolute_user_path(path))

    @property
    def parallel_build(self) -> bool:
        """True if parts are built at once, which `max_workers` bounds."""
        return self.max_workers != 1

    @parallel_build.setter
    def parallel_build(self, value: bool) -> None:
        if value != self.parallel_build:
            self.max_workers = None if value else 1

    @property
    def weight_sharing(self) -> bool:
        """True if the graphs of a part keep one copy of their weights; hardware only."""
        return bool(self.options.compilation.get(_WEIGHT_SHARING, True))

    @weight_sharing.setter
    def weight_sharing(self, value: bool) -> None:
        self.set_compilation_options({_WEIGHT_SHARING: value})

    @property
    def multi_graph(self) -> bool:
        """True if graphs are made for several context lengths."""
        return len(self.options.arn_cl_options.context_length) > 1

    @multi_graph.setter
    def multi_graph(self, value: bool) -> None:
        if value and not self.multi_graph:
            self.set_transformation_options({_LENGTHS: MULTI_GRAPH_CONTEXT_LENGTHS})
        elif not value and self.multi_graph:
            longest = max(self.options.arn_cl_options.context_length)
            self.set_transformation_options({_LENGTHS: (longest,)})

    @property
    def native_kv(self) -> bool:
        """True if caches have the NPU's own layout: never, with this toolchain."""
        return False

    @native_kv.setter
    def native_kv(self, value: bool) -> None:
        if value:
            reason = (
                "onnxruntime-qnn gets the NPU's own cache layout wrong, and no public document "
                "says which program of the QAIRT SDK makes it"
            )
            raise InvalidOptionError("native_kv", reason, ())

    def attach_model_for_arn(
        self,
        arn: int,
        model_path: str | PathLike[str],
        encodings_path: str | PathLike[str] | None = None,
        name: str | None = None,
    ) -> "AttachedBuilder":
        """Use another export of the same model for the graphs of one AR.

        Args:
            arn: the AR of its graphs; it joins the ARs to build.
            model_path: the ONNX, or its folder; configuration and tokenizer are those of this
                builder.
            encodings_path: in place of the encodings beside the ONNX.
            name: of the child, and of the folder of its stages below the cache's root; by default
                `attached_ar{arn}`.

        Returns:
            A builder that inherits everything from this one, and may set `graphs.*`, `mha2sha.*`
            and what calibrates activations for its own graphs.

        Raises:
            ModelFileError: there is no ONNX.
            InvalidOptionError: the AR has a model attached already, or the name is taken, or can be
                no folder's.
        """
        if arn in self._attached:
            raise InvalidOptionError("arn", f"AR {arn} has a model attached already", ())
        name = name or f"attached_ar{arn}"
        names = {self._source.name, *(child.name for child in self._attached.values())}
        if not is_model_name(name) or name in names:
            reason = f"{name!r} is another model's" if name in names else f"no folder: {name!r}"
            raise InvalidOptionError("name", reason, ())
        source = attached_source(
            absolute_user_path(model_path), self._source, _path(encodings_path)
        )
        ars = self.options.arn_cl_options.auto_regression_number
        if arn not in ars:
            self.set_transformation_options({_ARS: (*ars, arn)})
        child = AttachedBuilder(name, source)
        self._attached[arn] = child
        return child

    def sync_attached_builder_options(self) -> None:
        """Check that the attached builders have this one's options; `build()` does it too."""
        shapes = self.options.arn_cl_options
        own = self.skip_ar_conversion or shapes.skip_ar_cl_conversion
        for arn, child in self._attached.items():
            if arn not in shapes.auto_regression_number and not own:
                ars = list(shapes.auto_regression_number)
                raise InvalidOptionError(_ARS, f"{child.name} is attached for AR {arn}: {ars}", ())
            child.check(self.options, self._targets)

    def plan(self) -> Build:
        """Return the build that `build()` runs, for callers that want the outputs of its stages.

        Warns:
            ModelWarning: a context length is beyond `max_position_embeddings`.

        Raises:
            InvalidOptionError: no target is set, or options contradict each other, or the installed
                Genie gets the kind of speculation wrong.
            BuildError: an AR does not fit the context length.
        """
        if not self._targets:
            raise InvalidOptionError("targets", "none is set; call set_targets() first", ())
        (target,) = self._targets
        self.sync_attached_builder_options()
        options = self.options
        if self._other is not None:
            self._refuse_what_encoders_lack()
            return self._other.plan_build(
                self._source,
                options,
                options.compile_config(target),
                self._cache_root,
                self._toolchain,
            )
        check_start_points(options.mha2sha, self._source)
        trained = self.lora_config or self.speculative_config
        plan = BuildPlan(
            options,
            options.compile_config(target),
            additions_of(options, target, self._toolchain),
            {arn: child.graph_options for arn, child in self._attached.items()},
            {
                arn: child.options(options).mha2sha
                for arn, child in self._attached.items()
                if child.sets(_MHA_OPTIONS)
            },
            quantization={
                arn: child.options(options).quantization
                for arn, child in self._attached.items()
                if child.sets(*_CALIBRATION)
            },
        ).checked(
            n_layers=layers_of(self._source),
            spread=trained is not None and is_spread(self._source),
        )
        for config in plan.compile_configs():
            self._toolchain.check(config)
        workers = default_workers() if self.max_workers is None else self.max_workers
        for addition in plan.additions:
            addition.check_target(target, self._cache_root)
        self._warn_of_length()
        sources = Sources(
            self._source,
            {arn: child.source for arn, child in self._attached.items()},
            {arn: child.name for arn, child in self._attached.items()},
        )
        return Build(sources, plan, self._cache_root, self._toolchain, workers)

    def _refuse_what_encoders_lack(self) -> None:
        for key, value in (
            ("lora_config", self.lora_config),
            ("speculative_config", self.speculative_config),
            ("prepare_embedding_lut", self.prepare_embedding_lut),
            ("skip_ar_conversion", self.skip_ar_conversion),
            ("attach_model_for_arn", self._attached),
            ("op_packages", self.op_packages),
            ("max_kl", self.max_kl),
        ):
            if value:
                raise InvalidOptionError(key, "a text encoder has none; leave it out", ())

    def _warn_of_length(self) -> None:
        options = self.options.arn_cl_options
        longest, positions = max(options.context_length), positions_of(self._source)
        if positions is None or longest <= positions or options.skip_ar_cl_conversion:
            return
        warnings.warn(
            f"{self._source.name} was made for {positions:.0f} positions (max_position_embeddings "
            f"in config.json): beyond them a context length of {longest} may answer badly",
            ModelWarning,
            stacklevel=3,
        )

    def build(self, on_stage: OnStage | None = None) -> GenAIContainer:
        """Run all stages; those with unchanged inputs and options are taken from the cache.

        Args:
            on_stage: called after each stage with its record.

        Warns:
            ModelWarning: options ask for other bits than the encodings of the ONNX have.
        """
        return self.plan().run(on_stage)

    def verify(
        self,
        options: VerifyOptions | None = None,
        *,
        emulator: bool = False,
        reference_with: ReferenceEngine = "onnx",
        on_stage: OnStage | None = None,
        on_comparison: OnComparison | None = None,
    ) -> VerificationReport:
        """Build, and run the model before and after each stage on sample input.

        Args:
            options: how much is run.
            emulator: compare compiled graphs too; for a phone they are compiled a second time,
                without shared weights, as the emulator needs them.
            reference_with: `transformers` compares the first stage with transformers too.
            on_stage: as `build` takes it.
            on_comparison: called after each comparison.
        """
        return verify_build(
            self.plan(),
            options,
            emulator=emulator,
            reference_with=reference_with,
            on_stage=on_stage,
            on_comparison=on_comparison,
        )


class AttachedBuilder:
    """The builder of one AR's graphs, from an export of their own; the rest is its parent's."""

    __slots__ = ("_own", "_set", "_targets", "name", "source")

    def __init__(self, name: str, source: OnnxSource) -> None:
        self.name = name
        self.source = source
        self._own = BuildOptions()
        self._set: dict[str, object] = {}
        self._targets: tuple[Target, ...] = ()

    def set_targets(self, targets: Sequence[str]) -> Self:
        """Name the target again; it shares weights with its parent, and so must its target."""
        self._targets = tuple(map(parse_target, targets))
        return self

    def set_options(self, options: Mapping[str, object]) -> Self:
        """Set options by dotted keys.

        Its own may be `graphs.*`, `mha2sha.*`, and of `quantization` what calibrates activations:
        `act_bitwidth`, `activation_precision`, `activation_ranges`, `calibration_tokens`.
        """
        self._own = self._own.with_options(options, SETS)
        values = {**self._own.as_options(), **self._own.compilation}
        self._set |= {key: values[key] for key, _ in by_dotted_keys(options)}
        return self

    set_transformation_options = set_options
    set_conversion_options = set_options
    set_compilation_options = set_options

    @property
    def graph_options(self) -> Mapping[str, object]:
        """Options of these graphs alone."""
        return {key: value for key, value in self._set.items() if key.startswith(_GRAPH_OPTIONS)}

    def sets(self, *beginnings: str) -> bool:
        """Return whether it has an option of its own that begins so."""
        return any(key.startswith(beginnings) for key in self._set)

    def options(self, parent: BuildOptions) -> BuildOptions:
        """Return the options of its graphs: the parent's where it has none itself."""
        own = (_MHA_OPTIONS, *_CALIBRATION)
        return parent.with_options({k: v for k, v in self._set.items() if k.startswith(own)})

    def check(self, parent: BuildOptions, targets: Sequence[Target]) -> None:
        """Check that nothing differs from the parent that decides the weights or the binary.

        Args:
            parent: its options.
            targets: the parent's, which decide the defaults.
        """
        if self._targets and self._targets != tuple(targets):
            own_names = ", ".join(map(str, self._targets))
            parent_names = ", ".join(map(str, targets))
            reason = f"the attached builder {self.name} has {own_names}; its parent has "
            reason += parent_names or "none"
            raise InvalidOptionError("targets", reason, ())
        inherited: dict[str, object] = {}
        for target in targets:
            inherited |= parent.compile_config(target).as_options()
        inherited |= {**parent.as_options(), **parent.compilation}
        for key, value in self._set.items():
            if not key.startswith(_OWN) and inherited.get(key) != value:
                reason = (
                    f"the attached builder {self.name} differs from its parent; it may set "
                    f"{_GRAPH_OPTIONS}*, {_MHA_OPTIONS}*, {', '.join(_CALIBRATION)} alone"
                )
                raise InvalidOptionError(key, reason, ())
        check_start_points(self.options(parent).mha2sha, self.source)


def _json_of(config: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(config), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InvalidOptionError(
            "config_dict", f"it cannot be a config.json: {error}", ()
        ) from error


def _path(path: str | PathLike[str] | None) -> Path | None:
    return None if path is None else absolute_user_path(path)


def _default_toolchain() -> Toolchain:
    return OrtQnnToolchain()
