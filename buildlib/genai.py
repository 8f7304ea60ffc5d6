"""The Gen AI Builder: a model folder in, a `GenAIContainer` out, in one call.

The names are the vendor's ("Gen AI Builder Overview", docs.qualcomm.com 80-87189-2):

    builder = GenAIBuilderFactory.create("model_dir", cache_root="~/.cache/qnnfarm")
    builder.set_targets(["chipset:SM8750"])
    container = builder.build()
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Self

from buildlib.build import Build, BuildPlan, OnStage
from buildlib.cache import default_cache_root
from buildlib.container.container import GenAIContainer
from buildlib.errors import InvalidOptionError
from buildlib.options import ModelTransformerConfig
from buildlib.source import ModelSource, find_source
from buildlib.targets import Target, parse_target
from buildlib.toolchains.base import Toolchain

BACKEND_HTP = "HTP"


class GenAIBuilderFactory:
    """Makes the builder that fits a model."""

    @classmethod
    def create(
        cls,
        pretrained_model_path: str | PathLike[str],
        backend_type: str = BACKEND_HTP,
        *,
        cache_root: str | PathLike[str] | None = None,
        calibration_text: str | None = None,
        toolchain: Toolchain | None = None,
    ) -> "GenAIBuilderHTP":
        """A builder for the model in a folder.

        Args:
            pretrained_model_path: a folder with ONNX and encodings, or with a checkpoint that is
                exported first.
            backend_type: `HTP`.
            cache_root: where stage outputs are kept; by default the user's cache folder.
            calibration_text: what a checkpoint's quantization is calibrated on, when its folder has
                none.
            toolchain: what compiles; by default the one from PyPI.

        Raises:
            ModelNotFoundError: nothing in the folder can be built.
            CalibrationTextMissingError: a checkpoint without text.
            InvalidOptionError: a backend other than HTP.
        """
        if backend_type != BACKEND_HTP:
            raise InvalidOptionError(
                "backend_type", f"{backend_type!r} is not built here", (BACKEND_HTP,)
            )
        folder = Path(pretrained_model_path).expanduser()
        source = find_source(folder, calibration_text)
        root = default_cache_root() if cache_root is None else Path(cache_root).expanduser()
        return GenAIBuilderHTP(source, root, toolchain or _default_toolchain())


class GenAIBuilderHTP:
    """Builds a model for the Hexagon tensor processor of one target.

    Set targets and options, then `build()`.
    """

    def __init__(self, source: ModelSource, cache_root: Path, toolchain: Toolchain) -> None:
        self._source = source
        self._cache_root = cache_root
        self._toolchain = toolchain
        self._targets: tuple[Target, ...] = ()
        self._transformation = ModelTransformerConfig()

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
        self._transformation = self._transformation.with_options(options)
        return self

    def plan(self) -> Build:
        """The build that `build()` runs, for callers that want the outputs of its stages.

        Raises:
            InvalidOptionError: no target is set.
            InvalidShapeError: an AR does not fit the context length.
        """
        if not self._targets:
            raise InvalidOptionError("targets", "none is set; call set_targets() first", ())
        (target,) = self._targets
        plan = BuildPlan.create(self._transformation, target)
        return Build(self._source, plan, self._cache_root, self._toolchain)

    def build(self, on_stage: OnStage | None = None) -> GenAIContainer:
        """Run all stages; those whose inputs and options have not changed are taken from the cache.

        Args:
            on_stage: called after each stage with what it was, how long it took, and whether it was
                cached.

        Raises:
            BuildError: any of its kinds; what was built before stays cached.
        """
        return self.plan().run(on_stage)


def _default_toolchain() -> Toolchain:
    from buildlib.toolchains.ort_qnn import OrtQnnToolchain

    return OrtQnnToolchain()
