"""Search for what quantization costs in a pipeline, and for mixed precision within a bound.

The model in float is what the first stage made, the quantized one what the last stage before the
builder did. Tensors are ranked on this host's CPU, with their own encodings: a weight that a
technique has changed counts as changed. A mixture has the original weights at 8 bits where it
raises them, and the quantized model's own everywhere else. The proposal is then an option of the
recipe's quantization, which runs again with it, is built for the emulator, and checked there. A
model that came with encodings follows no options: its mixture itself is built.
"""

import copy
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from buildlib.cache.sizes import size_text
from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.layout import CONFIG_FILE, ENCODINGS_FILE, MODEL_FILE
from buildlib.container.container import GenAIContainer
from buildlib.container.manifest import is_container
from buildlib.encodings.files import load_encodings, save_encodings
from buildlib.evaluation.proposal import (
    Proposal,
    QualityBound,
    measure_sweep,
    mixed_encodings,
    propose_precision,
)
from buildlib.evaluation.sensitivity import (
    UNIT_KINDS,
    Granularity,
    Sensitivity,
    UnitCost,
    UnitKind,
    rank_tensors,
)
from buildlib.evaluation.sweep import Quantized, SensitivityModel, changed_weights
from buildlib.graph.files import load_model, save_model, tensor_array
from buildlib.pipeline.model_folder import link_configuration
from buildlib.quantize.tensor_writer import TensorWriter, replace_constant
from buildlib.reference.divergence import Divergence
from buildlib.reference.evaluation import evaluate_model, record_float
from harness.console import Row, answers, print_rows
from harness.errors import PipelineStateError, WrongUseError
from harness.pipeline.comparison import ComparedText, float_folder
from harness.pipeline.defaults import recipe_text
from harness.pipeline.host_model import open_host_model
from harness.pipeline.llm import LLMPipeline
from harness.pipeline.recipe import Recipe
from harness.pipeline.stage import ModelFolder
from harness.pipeline.stages import Quantization
from harness.words import pluralize

QUANTIZATION, BUILDER = "quantization", "genai_builder"
RAISED = "raised.safetensors"
"""Weights that a technique had changed for 4 bits, as the model in float has them."""
_EMULATOR = ":emulator"
_HEADINGS = ("tensor", "KL alone", "SQNR", "layer's SQNR", "bits", "KL without")


@dataclass(frozen=True)
class BisectOptions:
    """What is ranked, and what may get more bits.

    Attributes:
        bound: to get within; None ranks only.
        granularity: by default tensors, and layers of large models.
        kinds: of tensors to rank; weights alone can get more bits.
        both_ways: measure too what the model gains if one alone is left in float.
        build: build the proposal, and check it on the emulator.
        out: new folder for the model of the proposal, which `qnnfarm build` takes.
    """

    bound: QualityBound | None = None
    granularity: Granularity | None = None
    kinds: tuple[UnitKind, ...] = UNIT_KINDS
    both_ways: bool = False
    build: bool = True
    out: Path | None = None


@dataclass(frozen=True)
class Bisection:
    """Result of a search.

    Attributes:
        windows: pieces of the text that all was measured on.
        proposal: None without a bound.
        checked: the built proposal on the emulator; None if nothing was built.
        out: folder of its model.
    """

    sensitivity: Sensitivity
    windows: int
    proposal: Proposal | None = None
    checked: Divergence | None = None
    out: Path | None = None

    @property
    def met(self) -> bool:
        """Whether the bound holds wherever it was measured; true without a bound."""
        proposal = self.proposal
        if proposal is None:
            return True
        return proposal.met and (self.checked is None or proposal.bound.holds(self.checked))

    @property
    def mixed_precision(self) -> list[str]:
        """The proposal as `quantization.mixed_precision` takes it: `NAME=BITS`."""
        return _as_option(self.proposal)

    def print(self, top: int | None = 20) -> None:
        """Print the ranking, and the proposal."""
        costs = self.sensitivity.costs
        rows = [Row(_cells(cost)) for cost in costs[:top]]
        both = any(cost.rest is not None for cost in costs)
        headings = _HEADINGS if both else _HEADINGS[:-1]
        print_rows(
            headings, [Row(row.cells[: len(headings)]) for row in rows], right=set(headings[1:])
        )
        if len(rows) < len(costs):
            answers().print(f"and {len(costs) - len(rows)} that cost less")
        answers().print(f"all of it quantized: {_describe(self.sensitivity.whole)}")
        if self.proposal is not None:
            self._print_proposal(self.proposal)

    def _print_proposal(self, proposal: Proposal) -> None:
        console = answers()
        if not proposal.raised:
            held = "no weight needs more bits" if proposal.met else "no weight can get more bits"
            console.print(f"{proposal.bound}: {held}")
        else:
            tensors = pluralize(len(proposal.bits), "weight")
            console.print(
                f"{proposal.bound}: {tensors} at 8 bits, {size_text(proposal.bytes_more)} more: "
                f"{_describe(proposal.after)}"
            )
            if not proposal.met:
                console.print("that is all that can get more bits, and the bound is not met")
            console.print("quantization.mixed_precision:")
            for text in self.mixed_precision:
                console.print(f"  - {text}")
        if self.out is not None:
            console.print(f"{self.out}: its model, for `qnnfarm build`")
        if self.checked is not None:
            console.print(f"built, on the HTP emulator: {_describe(self.checked)}")

    def as_document(self) -> dict[str, object]:
        """Return the result as JSON can hold it; SQNRs that are infinite are null."""
        proposal = self.proposal
        return {
            "windows": self.windows,
            "positions": self.sensitivity.whole.steps,
            "granularity": self.sensitivity.granularity,
            "whole": _values(self.sensitivity.whole),
            "costs": [_cost_document(cost) for cost in self.sensitivity.costs],
            "proposal": None
            if proposal is None
            else {
                "bound": str(proposal.bound),
                "met": proposal.met,
                "measurements": proposal.measurements,
                "bytes_more": proposal.bytes_more,
                "mixed_precision": self.mixed_precision,
                "before": _values(proposal.before),
                "after": _values(proposal.after),
            },
            "emulator": None if self.checked is None else _values(self.checked),
            "out": None if self.out is None else str(self.out),
            "met": self.met,
        }


def bisect_pipeline(
    pipe: LLMPipeline,
    text: str | None = None,
    windows: int | None = None,
    options: BisectOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Bisection:
    """Rank what the quantization of a pipeline's model costs, and propose mixed precision.

    Args:
        pipe: its stages up to the builder are run if they have not been.
        text: to measure on; by default the data set of the recipe's first metric.
        windows: pieces of it; by default as many as that metric has.
        options: what to rank, and the bound.
        progress: called with (segments run, such in all) while tensors are ranked.

    Raises:
        PipelineStateError: no stage quantizes the model.
        BuildError: a model cannot run, or the proposal not be built.
    """
    wanted = options or BisectOptions()
    made = _quantized(pipe)
    whole, folder = float_folder(made[0]), _last_model(made)
    compared = ComparedText(whole, *pipe.text_to_compare(text, windows))
    scored = [window.scored for window in compared.windows]
    config = load_config(whole / CONFIG_FILE)
    encodings = load_encodings(folder / ENCODINGS_FILE).by_name()
    changed = changed_weights(whole / MODEL_FILE, folder / MODEL_FILE)
    kept = pipe.cache_root / pipe.model_name
    with (
        # Variants are put beside the model: not into an entry that other builds check.
        tempfile.TemporaryDirectory(dir=kept, prefix=".variants.") as variants,
        SensitivityModel(
            save_model(load_model(whole / MODEL_FILE), Path(variants) / MODEL_FILE),
            config,
            scored,
            changed,
        ) as model,
    ):
        found = rank_tensors(
            model,
            encodings,
            granularity=wanted.granularity,
            kinds=wanted.kinds,
            both_ways=wanted.both_ways,
            progress=progress,
        )
        if wanted.bound is None:
            return Bisection(found, len(scored))
        proposal = propose_precision(found.costs, wanted.bound, measure_sweep(model, found))
    if not proposal.raised:
        return Bisection(found, len(scored), proposal)
    with tempfile.TemporaryDirectory(dir=kept, prefix=".mixture.") as scratch:
        if _takes_options(pipe, whole):
            mixed = _with_options(pipe, proposal)
        else:
            place = Path(scratch) / pipe.model_name
            write_mixture(whole, folder, proposal, encodings, place)
            mixed = _of_mixture(pipe, place)
        checked = _check(mixed, wanted, compared)
        pipe.manifest.save(pipe.manifest_path)  # of this pipeline again, not of the mixed one
    return Bisection(found, len(scored), proposal, checked, wanted.out)


def recipe_of(
    source: Path,
    model: str | None,
    quantization: str,
    shape: tuple[int | None, int | None],
    target: str,
) -> tuple[str, dict[str, Any]]:
    """Return the model and the recipe of what was given without one.

    Args:
        source: folder of a model, or a container.
        model: that a container was built from.
        quantization: quantization recipe of a model; a container's is told by its bits.
        shape: AR and CL; None is what the container has, or what suits the model.
        target: of a model; a container has its own.

    Raises:
        WrongUseError: a container without its model.
        BuildError: the model or container cannot be read.
    """
    ar, cl = shape
    named = model or str(source)
    if is_container(source):
        if model is None:
            raise WrongUseError(f"{source} has no weights in float: name its checkpoint, --model")
        container = GenAIContainer.load(source)
        graphs = container.metadata.graphs
        ar, cl = ar or max(graphs.auto_regression_numbers), cl or graphs.context_length
        target = container.metadata.target.name
        quantization = (container.precision or quantization).lower()
    recipe = yaml.safe_load(recipe_text(named, target))
    sizes = recipe["generator_config"]
    recipe["generator_config"] = {
        "sequence_length": ar or sizes["sequence_length"],
        "context_length": cl or sizes["context_length"],
    }
    recipe["stages"]["quantization"] = {"recipe_name": quantization}
    return named, recipe


def write_mixture(
    float_model: Path, quantized: Path, proposal: Proposal, encodings: Quantized, out: Path
) -> Path:
    """Write the model of a proposal as the folder that `qnnfarm build` takes.

    Args:
        float_model: folder of the model in float, whose weights the raised tensors have.
        quantized: folder of the quantized model, which gives everything else.
        proposal: what is raised.
        encodings: of the quantized model, by name.
        out: new folder.

    Raises:
        ModelFileError: the models cannot be read, or `out` not be written.
    """
    model = load_model(quantized / MODEL_FILE)
    changed = changed_weights(float_model / MODEL_FILE, quantized / MODEL_FILE)
    original = load_model(float_model / MODEL_FILE).graph.initializers
    back = {n: t for n in proposal.bits if n in changed and (t := original[n].const_value)}
    out.mkdir(parents=True, exist_ok=True)
    if back:
        shapes = {name: tuple(tensor.shape.numpy()) for name, tensor in back.items()}
        with TensorWriter(out / RAISED, shapes) as writer:
            for name, tensor in back.items():
                writer.write(name, tensor_array(tensor))
                replace_constant(model.graph, name, writer.tensor(name))
    save_model(model, out / MODEL_FILE)
    given = load_encodings(quantized / ENCODINGS_FILE)
    mixed = mixed_encodings(encodings, proposal.raised)
    groups = ("activation_encodings", "param_encodings")
    update = {group: tuple(mixed[e.name] for e in getattr(given, group)) for group in groups}
    save_encodings(given.model_copy(update=update), out / ENCODINGS_FILE)
    link_configuration(quantized, out)
    return out


def last_before_builder(pipe: LLMPipeline) -> str:
    """Return the name of the stage whose output is ranked.

    Raises:
        PipelineStateError: the recipe has nothing between loading and building.
    """
    names = list(pipe.config.stages)
    last = names.index(BUILDER) - 1 if BUILDER in names else len(names) - 1
    if last < 1:
        raise PipelineStateError("the recipe has no stage that quantizes the model")
    return names[last]


def _quantized(pipe: LLMPipeline) -> list[dict[str, object]]:
    """Return the outputs after each stage before the builder, which are run if need be."""
    last = last_before_builder(pipe)
    if last not in pipe.completed:
        pipe.construct(until=last)
    names = list(pipe.config.stages)
    return [pipe.outputs(name) for name in names[: names.index(last) + 1]]


def _last_model(made: Sequence[Mapping[str, object]]) -> Path:
    model = made[-1].get("model")
    if not isinstance(model, ModelFolder) or not model.quantized:
        raise PipelineStateError("no stage has quantized the model: name `quantization` in stages")
    return model.path


def _takes_options(pipe: LLMPipeline, whole: Path) -> bool:
    """Whether the recipe's own stage can mix: what has encodings of its own follows no option."""
    quantizes = pipe.config.stages.get(QUANTIZATION) is Quantization
    return quantizes and not (whole / ENCODINGS_FILE).is_file()


def _with_options(pipe: LLMPipeline, proposal: Proposal) -> LLMPipeline:
    """Return the pipeline with the proposal among the options of its quantization."""
    data = copy.deepcopy(dict(pipe.manifest.recipe))
    section = data["stages"][QUANTIZATION]
    options = section.setdefault("options", {})
    options["mixed_precision"] = [*options.get("mixed_precision", ()), *_as_option(proposal)]
    return _for_emulator(pipe, str(pipe.model_dir), data)


def _of_mixture(pipe: LLMPipeline, folder: Path) -> LLMPipeline:
    """Return a pipeline of a model whose values all have encodings."""
    data = copy.deepcopy(dict(pipe.manifest.recipe))
    stages = {"model_loader": {}, QUANTIZATION: {"recipe_name": "w8a16"}}
    if BUILDER in data["stages"]:
        stages[BUILDER] = data["stages"][BUILDER]
    return _for_emulator(pipe, str(folder), {**data, "stages": stages})


def _for_emulator(pipe: LLMPipeline, model: str, data: dict[str, Any]) -> LLMPipeline:
    target = data.get("soc_details")
    if target is not None and not target.endswith(_EMULATOR):
        data["soc_details"] = target + _EMULATOR
    data["cache_dir"] = str(pipe.cache_root)
    data.pop("enable_cache", None)
    data.pop("model_id_or_path", None)
    recipe = Recipe(data)
    recipe.path = pipe.config.folder / "recipe.yaml"
    return LLMPipeline.from_pretrained(model, recipe=recipe)


def _check(mixed: LLMPipeline, wanted: BisectOptions, compared: ComparedText) -> Divergence | None:
    """Write a mixed model, build it for the emulator, and evaluate it there, as far as wanted."""
    builds = wanted.build and BUILDER in mixed.config.stages
    if not builds and wanted.out is None:
        return None
    mixed.construct(until=last_before_builder(mixed))
    if wanted.out is not None:
        mixed.export(wanted.out)
    if not builds or mixed.config.settings.soc_details is None:
        return None
    mixed.construct()
    config = load_config(compared.model / CONFIG_FILE)
    scored = [window.scored for window in compared.windows]
    with (
        record_float(compared.model / MODEL_FILE, config, scored) as reference,
        open_host_model(mixed.outputs(), mixed.cache_root / mixed.model_name) as model,
    ):
        return evaluate_model(model.loop, reference)


def _as_option(proposal: Proposal | None) -> list[str]:
    bits = {} if proposal is None else proposal.bits
    return [f"{name}={number}" for name, number in sorted(bits.items())]


def _cells(cost: UnitCost) -> list[str]:
    rest = "-" if cost.rest is None else f"{cost.rest.kl:.5f}"
    sqnr, output = (_decibels(value) for value in (cost.sqnr_db, cost.output_sqnr_db))
    return [cost.unit.name, f"{cost.alone.kl:.5f}", sqnr, output, str(cost.unit.bits), rest]


def _decibels(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.1f} dB"


def _describe(found: Divergence) -> str:
    away = found.perplexity / found.perplexity_float - 1
    return (
        f"perplexity {found.perplexity:.3f} ({away:+.2%} from float), KL {found.kl:.5f} nats, "
        f"top-1 {found.top1:.1%}"
    )


def _values(found: Divergence) -> dict[str, float]:
    return {
        "perplexity": found.perplexity,
        "perplexity_float": found.perplexity_float,
        "kl_divergence": found.kl,
        "top1_agreement": found.top1,
    }


def _cost_document(cost: UnitCost) -> dict[str, object]:
    def finite(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    return {
        "name": cost.unit.name,
        "kind": cost.unit.kind,
        "tensors": sorted(cost.unit.low),
        "bits": cost.unit.bits,
        "bytes_more": cost.unit.bytes_more,
        "sqnr_db": finite(cost.sqnr_db),
        "output_sqnr_db": finite(cost.output_sqnr_db),
        "alone": _values(cost.alone),
        "without": None if cost.rest is None else _values(cost.rest),
    }
