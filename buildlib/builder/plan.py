"""Plan of a build: shapes, parts, target, and every option that decides its outcome."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from buildlib.builder.additions import Addition, HostTable, OwnOperations
from buildlib.builder.build_options import BuildOptions
from buildlib.builder.options import (
    ARnContextLengthConfig,
    MhaConfig,
    OptionValue,
    SplitModelConfig,
)
from buildlib.builder.parts import GENIE, GraphContract, Part
from buildlib.errors import InvalidOptionError
from buildlib.graph.files import load_model
from buildlib.graph.shape import GraphShape
from buildlib.passes.balance import HEAD_COST, TABLE_COST, check_part_count
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.grids import head_weights
from buildlib.quantize.options import QuantizationOptions, check_arguments
from buildlib.targets import Target
from buildlib.toolchains.compile_config import CompileConfig


@dataclass(frozen=True)
class BuildPlan:
    """Options that have been checked against one another.

    Attributes:
        options: as the user set them; adapters set parts apart.
        compilation: with all that the target decides.
        additions: to the plain model, in the order of their stages.
        graph_options: `graphs.*` of single ARs.
        mha2sha, quantization: of single ARs, in place of that in `options`.
        shapes: graphs to make, by context length and then from decode to prefill; none when the
            model keeps the shape that it has (`at`).
        contract: names and order of the inputs and outputs of its graphs.
    """

    options: BuildOptions
    compilation: CompileConfig
    additions: tuple[Addition, ...] = ()
    graph_options: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    mha2sha: Mapping[int, MhaConfig] = field(default_factory=dict)
    quantization: Mapping[int, QuantizationOptions] = field(default_factory=dict)
    shapes: tuple[GraphShape, ...] = ()
    contract: GraphContract = GENIE

    def checked(self, *, n_layers: int | None = None, spread: bool = False) -> "BuildPlan":
        """Return a copy with its shapes; refuse options that do not fit each other.

        Args:
            n_layers: of the model, if its configuration tells.
            spread: whether the hidden states of the model were rotated or split before.
        """
        on_host = any(isinstance(one, HostTable) for one in self.additions)
        options = self.options
        if options.lora_config is not None:
            options = _split_off_ends(options, on_host=on_host)
        shapes = () if self.keeps_shape else graph_shapes(options.arn_cl_options, self.contract)
        for each in (options.quantization, *self.quantization.values()):
            Bitwidths.from_options(each)
            check_arguments(each)
        if spread or "spinquant" in options.quantization.weight_techniques:
            for one in self.additions:
                _check_trained(one)
        _check_splits(options.split_model, n_layers)
        ars = {shape.ar for shape in shapes}
        for one in self.additions if ars else ():
            one.check(sorted(ars), on_host=on_host)
        return replace(self, options=options, shapes=shapes)

    @property
    def operations(self) -> OwnOperations:
        """Operations of the user's own."""
        own = (one for one in self.additions if isinstance(one, OwnOperations))
        return next(own, OwnOperations())

    @property
    def target(self) -> Target:
        """SoC, or its emulator, that it is compiled for."""
        return self.compilation.target

    def mha_config(self, shape: GraphShape) -> MhaConfig:
        """Return the options that take attention apart at a shape."""
        return self.mha2sha.get(shape.ar, self.options.mha2sha)

    def quantization_of(self, ars: Iterable[int]) -> QuantizationOptions:
        """Return the options that quantize the model of some ARs."""
        own = (self.quantization[ar] for ar in ars if ar in self.quantization)
        return next(own, self.options.quantization)

    @property
    def keeps_shape(self) -> bool:
        """True if the model keeps its (AR, CL), or its AR."""
        options = self.options
        return options.skip_ar_conversion or options.arn_cl_options.skip_ar_cl_conversion

    @property
    def skip_key(self) -> str:
        """The option by which the model keeps its shape."""
        whole = self.options.arn_cl_options.skip_ar_cl_conversion
        return "arn_cl_options.skip_ar_cl_conversion" if whole else "skip_ar_conversion"

    def at(self, shapes: Iterable[GraphShape]) -> "BuildPlan":
        """Return a copy for the shapes that the models have."""
        options = self.options.arn_cl_options
        if not options.skip_ar_cl_conversion:
            lengths = _sorted("arn_cl_options.context_length", options.context_length)
            shapes = [GraphShape(shape.ar, cl) for shape in shapes for cl in lengths]
        own_shapes = tuple(sorted(set(shapes), key=lambda shape: (shape.cl, shape.ar)))
        if all(shape.ar != 1 for shape in own_shapes):
            names = ", ".join(map(str, own_shapes))
            reason = f"the model is at {names} and none of it decodes; attach one of AR 1"
            raise InvalidOptionError(self.skip_key, reason, ())
        return replace(self, shapes=own_shapes)

    def as_options(self) -> dict[str, OptionValue]:
        """Return all options under their dotted keys."""
        own: dict[str, Any] = {
            f"ar{ar}.{key}": value
            for ar, options in self.graph_options.items()
            for key, value in options.items()
        } | {
            f"ar{ar}.mha2sha.{key}": value
            for ar, config in self.mha2sha.items()
            for key, value in config.model_dump().items()
        }
        common = self.options.quantization.model_dump()
        own |= {
            f"ar{ar}.quantization.{key}": value
            for ar, quantization in self.quantization.items()
            for key, value in quantization.model_dump().items()
            if value != common[key]
        }
        return {
            **self.options.used_options(),
            **self.compilation.as_options(),
            **own,
            **{key: value for one in self.additions for key, value in one.as_options().items()},
            **({"skip_ar_conversion": True} if self.options.skip_ar_conversion else {}),
            **({"contract": self.contract.name} if self.contract != GENIE else {}),
        }

    def compile_configs(self) -> Iterator[CompileConfig]:
        """Compile options of all graphs, and of each AR that has its own."""
        yield self.compilation
        for ar, options in self.graph_options.items():
            yield self.compilation.with_graph_options([f"ar{ar}"], options)

    def compile_config(self, part: Part) -> CompileConfig:
        """Compile options of one part; graphs of an AR with its own options get these."""
        config = self.compilation
        for ar, options in self.graph_options.items():
            names = [part.graph(shape) for shape in self.shapes if shape.ar == ar]
            config = config.with_graph_options(names, options)
        return config

    @property
    def context_lengths(self) -> tuple[int, ...]:
        """Every context length, the shortest first."""
        return tuple(sorted({shape.cl for shape in self.shapes}))

    @property
    def ars(self) -> tuple[int, ...]:
        """Every AR, decode first."""
        return tuple(sorted({shape.ar for shape in self.shapes}))


def graph_shapes(
    options: ARnContextLengthConfig, contract: GraphContract = GENIE
) -> tuple[GraphShape, ...]:
    """Return the shape of every AR at every context length."""
    ars = _sorted("arn_cl_options.auto_regression_number", options.auto_regression_number)
    lengths = _sorted("arn_cl_options.context_length", options.context_length)
    if ars[0] != 1:
        key = "arn_cl_options.auto_regression_number"
        raise InvalidOptionError(key, f"{ars} has no 1: Genie decodes with an AR-1 graph", ())
    for cl in lengths if contract == GENIE else ():
        if cl % 2 == 0 and cl // 2 in ars[1:]:
            # CL - AR is AR then: the inputs of the cache are as long as its outputs.
            reason = (
                f"{cl} is twice the AR {cl // 2}: Genie confuses the old and the new part of such "
                "a cache, and the text would be wrong; change one of them"
            )
            raise InvalidOptionError("arn_cl_options.context_length", reason, ())
    return tuple(GraphShape(ar, cl) for cl in lengths for ar in ars)


def _sorted(key: str, numbers: Sequence[int]) -> list[int]:
    if len(set(numbers)) != len(numbers):
        raise InvalidOptionError(key, f"a number stands twice in {list(numbers)}", ())
    return sorted(numbers)


def _split_off_ends(options: BuildOptions, *, on_host: bool) -> BuildOptions:
    """Make embedding and head parts of their own, as documented of adapters."""
    apart = {"split_embedding": not on_host, "split_lm_head": True}
    return options.model_copy(update={"split_model": options.split_model.model_copy(update=apart)})


def _check_trained(addition: Addition) -> None:
    """Refuse what was trained on hidden states that the model has no more."""
    if addition.trained:
        reason = f"{addition.trained} were trained on hidden states that are rotated or split here"
        remedy = "build from the checkpoint, without spinquant"
        raise InvalidOptionError("quantization.techniques", f"{reason}: {remedy}", ())


def _check_splits(options: SplitModelConfig, n_layers: int | None) -> None:
    apart = options.split_embedding + options.split_lm_head
    if options.num_splits is None:
        return
    key = "split_model.num_splits"
    if options.num_splits <= apart:
        reason = f"{options.num_splits} leaves no part for the layers, with {apart} parts set apart"
        raise InvalidOptionError(key, reason, ())
    if n_layers is not None:
        check_part_count(options.num_splits, n_layers, apart)


def quantized_bytes(part: Path) -> int:
    """Estimate the bytes of a part's quantized weights: tables of 16 bits, all others of 8.

    Weights of 4 bits count as 8: DLCs unpack them.
    """
    total = 0
    for value in load_model(part).graph.initializers.values():
        tables = any(use.node.op_type == "Gather" for use in value.uses())
        total += (2 if tables else 1) * (value.const_value.size if value.const_value else 0)
    return total


def compile_cost(part: Path) -> float:
    """Estimate how long a part takes to convert and compile, in weights of decoder layers."""
    graph = load_model(part).graph
    heads, total = head_weights(graph), 0.0
    for name, value in graph.initializers.items():
        size = value.const_value.size if value.const_value else 0
        if name in heads:
            total += HEAD_COST * size
        elif any(use.node.op_type == "Gather" for use in value.uses()):
            total += TABLE_COST * 2 * size
        else:
            total += size
    return total
