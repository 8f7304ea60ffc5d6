"""The Gen AI Builder: a model folder in, a `GenAIContainer` out, in one call.

The names are the vendor's ("Gen AI Builder Overview", docs.qualcomm.com 80-87189-2):

    builder = GenAIBuilderFactory.create("model_dir", cache_root="~/.cache/qnnfarm")
    builder.set_targets(["chipset:SM8750"])
    container = builder.build()
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from buildlib.architectures import SupportedLLMs
from buildlib.build import Build, Sources
from buildlib.cache import default_cache_root
from buildlib.container.container import GenAIContainer
from buildlib.errors import InvalidOptionError
from buildlib.option_sets import GRAPH_OPTIONS, OptionSets
from buildlib.plan import Additions, BuildPlan
from buildlib.runner import OnStage
from buildlib.source import (
    ModelSource,
    OnnxSource,
    SourceFiles,
    architecture_of,
    attached_source,
    find_source,
)
from buildlib.targets import Target, parse_target
from buildlib.toolchains.base import Toolchain

if TYPE_CHECKING:
    from buildlib.embedding.config import EmbedDatatype
    from buildlib.lora.config import LoraBuilderInputConfig
    from buildlib.speculative import SpeculativeConfig
    from buildlib.verify.report import VerificationReport
    from buildlib.verify.verify import OnComparison, VerifyOptions

BACKEND_HTP = "HTP"

MULTI_GRAPH_CONTEXT_LENGTHS = (512, 1024, 2048, 3072, 4096)
"""Context lengths of a builder with `multi_graph`, as documented."""

_ARS = "arn_cl_options.auto_regression_number"
_LENGTHS = "arn_cl_options.context_length"
_SKIP = "arn_cl_options.skip_ar_cl_conversion"
_WEIGHT_SHARING = "context.weight_sharing_enabled"


class UnknownArchitectureWarning(UserWarning):
    """A model is of no family that is known to build; it may build all the same."""


class GenAIBuilderFactory:
    """Makes the builder that fits a model."""

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
        """A builder for the model in a folder.

        Args:
            pretrained_model_path: a folder with ONNX and encodings, the ONNX file itself, or a
                folder with a checkpoint that is exported first.
            backend_type: `HTP`.
            cache_root: where stage outputs are kept; by default the user's cache folder.
            tokenizer_path: in place of the folder's `tokenizer.json`.
            config_path: in place of the folder's `config.json`.
            config_dict: the configuration itself, in place of a file.
            encodings_path: in place of the encodings beside the ONNX.
            calibration_text: what is calibrated on where encodings are missing, when the folder has
                no text of its own.
            toolchain: what compiles; by default the one from PyPI.

        Warns:
            UnknownArchitectureWarning: the model is of no known family.

        Raises:
            ModelNotFoundError: nothing in the folder can be built.
            CheckpointError: the configuration is no JSON object.
            CalibrationTextMissingError: a checkpoint without text.
            InvalidOptionError: a backend other than HTP, or two configurations.
        """
        if backend_type != BACKEND_HTP:
            raise InvalidOptionError(
                "backend_type", f"{backend_type!r} is not built here", (BACKEND_HTP,)
            )
        if config_path is not None and config_dict is not None:
            raise InvalidOptionError("config_dict", "config_path is given as well; give one", ())
        text = None if config_dict is None else json.dumps(dict(config_dict), sort_keys=True)
        files = SourceFiles(_path(tokenizer_path), _path(config_path), text, _path(encodings_path))
        folder = Path(pretrained_model_path).expanduser()
        source = find_source(folder, calibration_text, files)
        if architecture_of(source) is None:
            known = ", ".join(SupportedLLMs)
            warnings.warn(
                f"{source.name} is of no known family ({known}); it is built as its graph and its "
                "config.json say",
                UnknownArchitectureWarning,
                stacklevel=2,
            )
        root = default_cache_root() if cache_root is None else Path(cache_root).expanduser()
        return GenAIBuilderHTP(source, root, toolchain or _default_toolchain())


class GenAIBuilderHTP:
    """Builds a model for the Hexagon tensor processor of one target.

    Set targets and options, then `build()`.

    Attributes:
        lora_config: adapters to build in; embedding and head are then parts of their own.
        speculative_config: how several tokens are generated a step.
        prepare_embedding_lut: leave the embedding out of the graphs; the host looks tokens up.
        embedding_datatype: of that table.
        max_workers: parts built at once; by default as many as there are cores and memory for.
    """

    def __init__(self, source: ModelSource, cache_root: Path, toolchain: Toolchain) -> None:
        self._source = source
        self._cache_root = cache_root
        self._toolchain = toolchain
        self._targets: tuple[Target, ...] = ()
        self._options = OptionSets()
        self._attached: dict[int, AttachedBuilder] = {}
        self.lora_config: LoraBuilderInputConfig | None = None
        self.speculative_config: SpeculativeConfig | None = None
        self.prepare_embedding_lut = False
        self.embedding_datatype: EmbedDatatype = "uint16"
        self.max_workers: int | None = None

    def set_targets(self, targets: Sequence[str]) -> Self:
        """Name the SoC to build for: `chipset:SM8750`, `SM8750` or `SM8750:emulator`.

        Raises:
            UnknownSocError: the catalog has no such SoC.
            InvalidOptionError: not exactly one; a container is for one target.
        """
        if len(targets) != 1:
            raise InvalidOptionError(
                "targets", f"a container is built for one target, not {len(targets)}", ()
            )
        self._targets = tuple(parse_target(target) for target in targets)
        return self

    def set_transformation_options(self, options: Mapping[str, object]) -> Self:
        """Set options by dotted keys: `arn_cl_options.context_length`, `split_model.num_splits`.

        Raises:
            InvalidOptionError: a key that does not exist, or a value it cannot take.
        """
        self._options = self._options.with_transformation(options)
        return self

    def set_conversion_options(self, options: Mapping[str, object]) -> Self:
        """Set options by dotted keys: `quantization.act_bitwidth`.

        Raises:
            InvalidOptionError: a key that does not exist, or a value it cannot take.
        """
        self._options = self._options.with_conversion(options)
        return self

    def set_compilation_options(self, options: Mapping[str, object]) -> Self:
        """Set options by dotted keys: `graphs.vtcm_size_in_mb`, `context.weight_sharing_enabled`.

        Raises:
            InvalidOptionError: a key that does not exist, a value it cannot take, or something
                that the toolchain cannot do.
        """
        self._options = self._options.with_compilation(options)
        return self

    def set_options(self, options: Mapping[str, object]) -> Self:
        """Set options of any stage; each key belongs to one of the three sets above.

        Raises:
            InvalidOptionError: a key that does not exist, or a value it cannot take.
        """
        for key, value in options.items():
            self._options = self._options.with_option(key, value)
        return self

    @property
    def weight_sharing(self) -> bool:
        """Whether the graphs of a part keep one copy of their weights; hardware only."""
        return bool(self._options.compilation.get(_WEIGHT_SHARING, True))

    @weight_sharing.setter
    def weight_sharing(self, value: bool) -> None:
        self.set_compilation_options({_WEIGHT_SHARING: value})

    @property
    def skip_ar_conversion(self) -> bool:
        """Whether the model keeps the AR that it has."""
        return self._options.transformation.arn_cl_options.skip_ar_cl_conversion

    @skip_ar_conversion.setter
    def skip_ar_conversion(self, value: bool) -> None:
        self.set_transformation_options({_SKIP: value})

    @property
    def multi_graph(self) -> bool:
        """Whether graphs are made for several context lengths."""
        return len(self._options.transformation.arn_cl_options.context_length) > 1

    @multi_graph.setter
    def multi_graph(self, value: bool) -> None:
        if value and not self.multi_graph:
            self.set_transformation_options({_LENGTHS: MULTI_GRAPH_CONTEXT_LENGTHS})
        elif not value and self.multi_graph:
            longest = max(self._options.transformation.arn_cl_options.context_length)
            self.set_transformation_options({_LENGTHS: (longest,)})

    @property
    def native_kv(self) -> bool:
        """Whether caches have the NPU's own layout: never, with this toolchain."""
        return False

    @native_kv.setter
    def native_kv(self, value: bool) -> None:
        if value:
            reason = "onnxruntime-qnn has no NPU-native cache layout; the QAIRT SDK has"
            raise InvalidOptionError("native_kv", reason, ())

    def attach_model_for_arn(
        self,
        arn: int,
        model_path: str | PathLike[str],
        encodings_path: str | PathLike[str] | None = None,
        name: str | None = None,
    ) -> "AttachedBuilder":
        """Take another export of the same model for the graphs of one AR.

        Args:
            arn: the AR whose graphs come from it; it joins the ARs to build.
            model_path: the ONNX, or its folder; configuration and tokenizer are those of this
                builder.
            encodings_path: in place of the encodings beside the ONNX.
            name: what messages call it; by default `ar{arn}`.

        Returns:
            A builder that inherits everything from this one, and may set `graphs.*` alone.

        Raises:
            ModelNotFoundError: there is no ONNX.
            InvalidOptionError: the AR has a model attached already.
        """
        if arn in self._attached:
            raise InvalidOptionError("arn", f"AR {arn} has a model attached already", ())
        source = attached_source(Path(model_path).expanduser(), self._source, _path(encodings_path))
        child = AttachedBuilder(name or f"ar{arn}", source)
        self._attached[arn] = child
        ars = self._options.transformation.arn_cl_options.auto_regression_number
        if arn not in ars:
            self.set_transformation_options({_ARS: (*ars, arn)})
        return child

    def sync_attached_builder_options(self) -> None:
        """See that the attached builders have this one's options; `build()` does it too.

        Raises:
            InvalidOptionError: an attached builder has set something else than `graphs.*`.
        """
        for child in self._attached.values():
            child.check(self._options)

    def plan(self) -> Build:
        """The build that `build()` runs, for callers that want the outputs of its stages.

        Raises:
            InvalidOptionError: no target is set, or options contradict each other.
            InvalidShapeError: an AR does not fit the context length.
        """
        if not self._targets:
            raise InvalidOptionError("targets", "none is set; call set_targets() first", ())
        (target,) = self._targets
        self.sync_attached_builder_options()
        options = self._options
        graph_options = {arn: child.graph_options for arn, child in self._attached.items()}
        plan = BuildPlan.create(
            options.transformation,
            options.conversion,
            options.compile_config(target),
            graph_options,
            self._additions(),
        )
        self._toolchain.check(plan.compilation)
        sources = Sources(
            self._source, {arn: child.source for arn, child in self._attached.items()}
        )
        return Build(sources, plan, self._cache_root, self._toolchain, self.max_workers)

    def build(self, on_stage: OnStage | None = None) -> GenAIContainer:
        """Run all stages; those whose inputs and options have not changed are taken from the cache.

        Args:
            on_stage: called after each stage with what it was, how long it took, and whether it was
                cached.

        Raises:
            BuildError: any of its kinds; what was built before stays cached.
        """
        return self.plan().run(on_stage)

    def verify(
        self,
        options: "VerifyOptions | None" = None,
        *,
        emulator: bool = False,
        on_stage: OnStage | None = None,
        on_comparison: "OnComparison | None" = None,
    ) -> "VerificationReport":
        """Build, and run the model before and after each stage on sample input.

        Args:
            options: how much is run.
            emulator: compare compiled graphs too; for a phone they are compiled a second time,
                without shared weights, as the emulator needs them.
            on_stage: as `build` takes it.
            on_comparison: told of each comparison as it is made.

        Raises:
            BuildError: any of its kinds; that a comparison fails is in the report.
        """
        return self.plan().verify(
            options, emulator=emulator, on_stage=on_stage, on_comparison=on_comparison
        )

    def _additions(self) -> Additions:
        lora = self.lora_config
        if lora is not None and not lora.create_lora_graph:
            reason = "graphs that bring their own branches are not built here; set it to True"
            raise InvalidOptionError("lora_config.create_lora_graph", reason, ())
        table = self.embedding_datatype if self.prepare_embedding_lut else None
        return Additions(lora, table, self.speculative_config)


class AttachedBuilder:
    """The builder of one AR's graphs, from an export of their own; the rest is its parent's."""

    def __init__(self, name: str, source: OnnxSource) -> None:
        self.name = name
        self.source = source
        self._own = OptionSets()
        self._set: dict[str, object] = {}

    def set_options(self, options: Mapping[str, object]) -> Self:
        """As the parent's. What is no `graphs.*` must be as the parent has it.

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
        """What is set for these graphs alone."""
        return {key: value for key, value in self._set.items() if key.startswith(GRAPH_OPTIONS)}

    def check(self, parent: OptionSets) -> None:
        """See that no more than `graphs.*` differs from the parent.

        Raises:
            InvalidOptionError: names what does.
        """
        inherited = parent.as_options()
        for key, value in self._set.items():
            if not key.startswith(GRAPH_OPTIONS) and inherited.get(key) != value:
                reason = (
                    f"the attached builder {self.name} differs from its parent; "
                    f"it may set {GRAPH_OPTIONS}* alone"
                )
                raise InvalidOptionError(key, reason, ())


def _path(path: str | PathLike[str] | None) -> Path | None:
    return None if path is None else Path(path).expanduser()


def _default_toolchain() -> Toolchain:
    from buildlib.toolchains.ort_qnn import OrtQnnToolchain

    return OrtQnnToolchain()
