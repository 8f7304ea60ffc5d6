"""Search for the costs of quantization in a pipeline, and for mixed precision within a bound.

The model in float is the output of the first stage, the quantized one that of the last stage before
the builder. Tensors are ranked on this host's CPU, with their own encodings: a weight that a
technique has changed counts as changed. A mixture has the original weights at 8 bits where it
raises them, and the quantized model's own everywhere else. It is chosen on some windows of text and
checked on others: on the CPU, and then, as an option of the recipe's quantization, which runs again
with it, built for the emulator. A model that came with encodings follows no options: its mixture
itself is built. While a check fails, the next weights of the ranking are raised.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import yaml

from buildlib.builder.model_folder import link_configuration
from buildlib.builder.sources import OnnxSource, find_source
from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.layout import CONFIG_FILE, ENCODINGS_FILE, MODEL_FILE
from buildlib.container.container import GenAIContainer
from buildlib.container.manifest import is_container
from buildlib.encodings.files import load_encodings, save_encodings
from buildlib.graph.files import load_model, save_model, tensor_array
from buildlib.numerics.divergence import Divergence
from buildlib.numerics.evaluation import FloatLogits, evaluate_model
from buildlib.quantize.mixed_precision.proposal import (
    Measure,
    PrecisionSearch,
    Proposal,
    QualityBound,
    measure_sweep,
    mixed_encodings,
)
from buildlib.quantize.mixed_precision.sensitivity import (
    UNIT_KINDS,
    Granularity,
    Sensitivity,
    UnitCost,
    UnitKind,
    rank_tensors,
)
from buildlib.quantize.mixed_precision.sweep import Quantized, SensitivityModel, changed_weights
from buildlib.quantize.options import RECIPES, QuantizationOptions
from buildlib.quantize.tensor_writer import TensorWriter, replace_constant
from buildlib.sizes import size_text
from buildlib.targets import parse_target
from harness.console import Row, answers, print_remark, print_rows
from harness.errors import PipelineError, WrongUseError
from harness.pipeline.comparison import ComparedText, float_folder, quality_cells
from harness.pipeline.defaults import recipe_text
from harness.pipeline.host_model import open_host_model
from harness.pipeline.hub import find_model
from harness.pipeline.llm import LLMPipeline
from harness.pipeline.recipe import Recipe
from harness.pipeline.stage import ModelFolder
from harness.pipeline.stages import Quantization
from harness.runtimes.base import Window
from harness.words import pluralize

_HEADINGS = ("tensor", "KL alone", "SQNR", "layer's SQNR", "bits", "KL without")
_CHECK_HEADINGS = ("model", "runs on", "windows", "perplexity", "from float", "KL", "top-1")


@dataclass(frozen=True)
class MixtureQuality:
    """Quality of a model over the windows that chose a mixture, or over held-out ones."""

    where: Literal["CPU", "HTP emulator"]
    windows: Literal["choosing", "held out"]
    quality: Divergence


@dataclass(frozen=True)
class Try:
    """A proposal, and how it did, the last of the checks being that which decides."""

    proposal: Proposal
    checks: tuple[MixtureQuality, ...]


@dataclass(frozen=True)
class Bisection:
    """Result of a search.

    Attributes:
        windows: pieces of text that ranked and chose.
        held_out: other pieces, that checked; 0 without a bound.
        quantized: checks of the model that was ranked.
        tries: proposals in turn, the last of which is the result; none without a bound.
        out: folder of its model.
        build_command: that makes a container of it.
        container: check of the container that was given.
    """

    sensitivity: Sensitivity
    windows: int
    bound: QualityBound | None = None
    held_out: int = 0
    quantized: tuple[MixtureQuality, ...] = ()
    tries: tuple[Try, ...] = ()
    out: Path | None = None
    build_command: str = ""
    container: MixtureQuality | None = None

    @property
    def proposal(self) -> Proposal | None:
        """The last proposal; None without a bound."""
        return self.tries[-1].proposal if self.tries else None

    @property
    def checked(self) -> Divergence | None:
        """The built proposal on the emulator over held-out text; None if it was not built."""
        last = self.tries[-1].checks[-1] if self.tries else None
        return last.quality if last is not None and last.where == "HTP emulator" else None

    @property
    def met(self) -> bool:
        """True if the bound holds wherever the last proposal was measured; true without a bound."""
        if self.bound is None or not self.tries:
            return True
        held_out = (check.quality for check in self.tries[-1].checks if check.windows == "held out")
        return self.tries[-1].proposal.met and all(map(self.bound.holds, held_out))

    @property
    def mixed_precision(self) -> list[str]:
        """The proposal as `quantization.mixed_precision` takes it: `NAME=BITS`."""
        return as_option(self.proposal)

    def print(self, top: int | None = 20) -> None:
        """Print the ranking, the checks and the proposal."""
        costs = self.sensitivity.costs
        both = any(cost.rest is not None for cost in costs)
        headings = _HEADINGS if both else _HEADINGS[:-1]
        rows = [Row(_cells(cost)[: len(headings)]) for cost in costs[:top]]
        print_rows(headings, rows, right=set(headings[1:]))
        if len(rows) < len(costs):
            answers().print(f"and {len(costs) - len(rows)} that cost less")
        before = self.quantized or (MixtureQuality("CPU", "choosing", self.sensitivity.whole),)
        checks = [("container", self.container)] if self.container is not None else []
        checks += [("quantized", check) for check in before]
        checks += [(_name(one.proposal), check) for one in self.tries for check in one.checks]
        self._print_checks(checks)
        if self.proposal is not None:
            self._print_proposal(self.proposal)

    def _print_checks(self, checks: Sequence[tuple[str, MixtureQuality]]) -> None:
        answers().print()
        rows = [
            Row([
                name,
                check.where,
                check.windows,
                *quality_cells(check.quality),
            ])
            for name, check in checks
        ]  # fmt: skip
        print_rows(_CHECK_HEADINGS, rows, right=set(_CHECK_HEADINGS[3:]))
        tokens = pluralize(self.sensitivity.whole.steps, "token")
        summary = f"{tokens} in {pluralize(self.windows, 'window')} to rank"
        if self.held_out:
            summary += f" and choose on, {self.held_out} held out to check on"
        print_remark(summary)

    def _print_proposal(self, proposal: Proposal) -> None:
        console = answers()
        console.print()
        if proposal.raised:
            more = f"{_name(proposal)}, {size_text(proposal.bytes_more)} more"
        else:
            more = "no weight needs more bits" if self.met else "no weight can get more bits"
        console.print(f"{self.bound}: {more}: {self._outcome(proposal)}")
        if proposal.raised:
            console.print("quantization.mixed_precision:")
            for text in self.mixed_precision:
                console.print(f"  - {text}")
        if self.out is not None:
            console.print(f"{self.out}: its model; `{self.build_command}` builds it")

    def _outcome(self, proposal: Proposal) -> str:
        """Say whether the bound is met, and why the search ended if not."""
        last = self.tries[-1].checks[-1]
        where = f"on {'the HTP emulator' if self.checked is not None else 'the CPU'}"
        if self.met:
            return f"met {where}" + ("" if self.checked is not None else ", not built")
        if not proposal.met:
            return "not met with more bits for all that can get them: give a looser --bound"
        bound = proposal.bound
        text = f"not met: {bound.show(last.quality)} {where}"
        if last.where == "HTP emulator":
            cpu = next(c.quality for c in self.tries[-1].checks[::-1] if c.where == "CPU")
            text += f", though {bound.show(cpu)} on the CPU,"
        text += f" over held-out text after {pluralize(len(self.tries), 'proposal')}"
        able = sum(c.unit.kind == "weight" and bool(c.unit.high) for c in self.sensitivity.costs)
        advice = "allow more --tries, or " if len(proposal.raised) < able else ""
        return f"{text}: {advice}give a looser --bound"

    def as_document(self) -> dict[str, object]:
        """Return the result as JSON can hold it; SQNRs that are infinite are null."""
        proposal = self.proposal
        return {
            "windows": self.windows,
            "held_out_windows": self.held_out,
            "positions": self.sensitivity.whole.steps,
            "granularity": self.sensitivity.granularity,
            "whole": self.sensitivity.whole.metrics,
            "costs": [_cost_document(cost) for cost in self.sensitivity.costs],
            "container": None if self.container is None else _check_document(self.container),
            "quantized": [_check_document(check) for check in self.quantized],
            "tries": [_try_document(one) for one in self.tries],
            "proposal": None
            if proposal is None
            else {
                "bound": str(self.bound),
                "met": proposal.met,
                "measurements": proposal.measurements,
                "bytes_more": proposal.bytes_more,
                "mixed_precision": self.mixed_precision,
                "before": proposal.before.metrics,
                "after": proposal.after.metrics,
            },
            "emulator": None if self.checked is None else self.checked.metrics,
            "out": None if self.out is None else str(self.out),
            "met": self.met,
        }


def as_option(proposal: Proposal | None) -> list[str]:
    """Return a proposal as `quantization.mixed_precision` takes it."""
    bits = {} if proposal is None else proposal.bits
    return [f"{name}={number}" for name, number in sorted(bits.items())]


def _cells(cost: UnitCost) -> list[str]:
    rest = "-" if cost.rest is None else f"{cost.rest.kl:.5f}"
    sqnr, output = (_decibels(value) for value in (cost.sqnr_db, cost.output_sqnr_db))
    return [cost.unit.name, f"{cost.alone.kl:.5f}", sqnr, output, str(cost.unit.bits), rest]


def _decibels(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.1f} dB"


def _name(proposal: Proposal) -> str:
    weights = pluralize(len(proposal.bits), "weight")
    return f"{weights} at 8 bits" if proposal.raised else "as it is"


def _check_document(check: MixtureQuality) -> dict[str, object]:
    return {"runs_on": check.where, "windows": check.windows, **check.quality.metrics}


def _try_document(one: Try) -> dict[str, object]:
    checks = [_check_document(check) for check in one.checks]
    return {"mixed_precision": as_option(one.proposal), "checks": checks}


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
        "alone": cost.alone.metrics,
        "without": None if cost.rest is None else cost.rest.metrics,
    }


QUANTIZATION, BUILDER = "quantization", "genai_builder"
RAISED = "raised.safetensors"
"""Weights that a technique had changed for 4 bits, as the model in float has them."""
_EMULATOR = ":emulator"


@dataclass
class MixtureMaker:
    """Pipelines of proposals.

    Attributes:
        whole: folder of the model in float.
        folder: of the quantized model.
        encodings: of that, by name.
        scratch: folder for models of mixtures.
    """

    pipe: LLMPipeline
    whole: Path
    folder: Path
    encodings: Quantized
    scratch: Path

    def pipeline(self, proposal: Proposal) -> LLMPipeline:
        """Return a pipeline of a proposal, for the emulator; it has run no stage."""
        data = copy.deepcopy(dict(self.pipe.manifest.recipe))
        if self._takes_options():
            options = data["stages"][QUANTIZATION].setdefault("options", {})
            before = options.get("mixed_precision", ())
            options["mixed_precision"] = [*before, *as_option(proposal)]
            return _for_emulator(self.pipe, str(self.pipe.model_dir), data)
        place = self.scratch / str(len(proposal.raised)) / self.pipe.model_name
        if not place.exists():
            write_mixture(self.whole, self.folder, proposal, self.encodings, place)
        stages = {"model_loader": {}, QUANTIZATION: {"recipe_name": "w8a16"}}
        if BUILDER in data["stages"]:
            stages[BUILDER] = data["stages"][BUILDER]
        return _for_emulator(self.pipe, str(place), {**data, "stages": stages})

    def evaluate(self, proposal: Proposal, reference: FloatLogits) -> Divergence | None:
        """Build a proposal, and evaluate it on the emulator; None if the recipe builds nothing."""
        mixed = self.pipeline(proposal)
        if BUILDER not in mixed.config.stages or mixed.config.settings.soc_details is None:
            return None
        mixed.construct()
        return _run_container(mixed.outputs(), reference)

    def export(self, proposal: Proposal, out: Path) -> None:
        """Write the model of a proposal."""
        mixed = self.pipeline(proposal)
        mixed.construct(until=last_before_builder(mixed))
        mixed.export(out)

    def _takes_options(self) -> bool:
        """Return whether the recipe's own stage can mix: own encodings follow no option."""
        quantizes = self.pipe.config.stages.get(QUANTIZATION) is Quantization
        return quantizes and not (self.whole / ENCODINGS_FILE).is_file()


def write_mixture(
    float_model: Path, quantized: Path, proposal: Proposal, encodings: Quantized, out: Path
) -> Path:
    """Write the model of a proposal as the folder that `qnnfarm build` takes.

    Args:
        float_model: folder of the model in float, which gives the weights of raised tensors.
        quantized: folder of the quantized model, which gives everything else.
        proposal: the tensors to raise.
        encodings: of the quantized model, by name.
        out: new folder.
    """
    model = load_model(quantized / MODEL_FILE)
    weights = changed_weights(float_model / MODEL_FILE, quantized / MODEL_FILE)
    original = load_model(float_model / MODEL_FILE).graph.initializers
    back = {n: t for n in proposal.bits if n in weights and (t := original[n].const_value)}
    out.mkdir(parents=True, exist_ok=True)
    if back:
        shapes = {name: tuple(tensor.shape.numpy()) for name, tensor in back.items()}
        with TensorWriter(out / RAISED, shapes) as writer:
            for name, tensor in back.items():
                writer.write(name, tensor_array(tensor))
                replace_constant(model.graph, name, writer.tensor(name))
    save_model(model, out / MODEL_FILE)
    source = load_encodings(quantized / ENCODINGS_FILE)
    mixed = mixed_encodings(encodings, proposal.raised)
    groups = ("activation_encodings", "param_encodings")
    update = {group: tuple(mixed[e.name] for e in getattr(source, group)) for group in groups}
    save_encodings(source.model_copy(update=update), out / ENCODINGS_FILE)
    link_configuration(quantized, out)
    return out


def last_before_builder(pipe: LLMPipeline) -> str:
    """Return the name of the last stage before the builder, which makes the model to rank."""
    names = list(pipe.config.stages)
    last = names.index(BUILDER) - 1 if BUILDER in names else len(names) - 1
    if last < 1:
        raise PipelineError("the recipe has no stage that quantizes the model")
    return names[last]


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


DEFAULT_TRIES = 4
DEFAULT_RECIPE = "w8a16"


@dataclass(frozen=True)
class BisectOptions:
    """Tensors to rank, and those that may get more bits.

    Attributes:
        bound: to get within; None ranks only.
        granularity: by default tensors, and layers of large models.
        kinds: of tensors to rank; weights alone can get more bits.
        both_ways: measure too the gain of leaving one tensor alone in float.
        choose_on: text to rank and choose on; by default windows of the text to check on, after
            those that check.
        build: build the proposal, and check it on the emulator.
        tries: proposals to check at most, each with more weights than the one before.
        out: new folder for the model of the proposal, which `qnnfarm build` takes.
        container: one of the model in float, to check beside its quantization; those for the
            emulator alone can run here.
    """

    bound: QualityBound | None = None
    granularity: Granularity | None = None
    kinds: tuple[UnitKind, ...] = UNIT_KINDS
    both_ways: bool = False
    choose_on: str | None = None
    build: bool = True
    tries: int = DEFAULT_TRIES
    out: Path | None = None
    container: Path | None = None


def bisect_pipeline(
    pipe: LLMPipeline,
    text: str | None = None,
    windows: int | None = None,
    options: BisectOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Bisection:
    """Rank the costs of a pipeline's quantization, and propose mixed precision.

    Args:
        pipe: its stages up to the builder are run if they have not been.
        text: to measure on; by default the data set of the recipe's first metric.
        windows: pieces of it; by default as many as that metric has. With a bound they check the
            proposal, and as many others choose it.
        options: tensors to rank, and the bound.
        progress: called with (segments run, such in all) while tensors are ranked.

    Raises:
        PipelineError: no stage quantizes the model.
        WrongUseError: the text is too short.
        BuildError: a model cannot run, or the proposal not be built.
    """
    options = options or BisectOptions()
    whole, folder = _models(pipe)
    choosing, held_out = _cut(pipe, whole, (text, windows), options)
    encodings = load_encodings(folder / ENCODINGS_FILE).by_name()
    weights = changed_weights(whole / MODEL_FILE, folder / MODEL_FILE)
    parent = pipe.cache_root / pipe.model_name
    with ExitStack() as stack:
        # Variants are put beside the model: not into an entry that other builds check.
        scratch = Path(stack.enter_context(TemporaryDirectory(dir=parent, prefix=".variants.")))
        model = save_model(load_model(whole / MODEL_FILE), scratch / MODEL_FILE)
        config = load_config(whole / CONFIG_FILE)

        def open_model(cut: Sequence[Window]) -> SensitivityModel:
            scored = [window.scored for window in cut]
            return stack.enter_context(SensitivityModel(model, config, scored, weights))

        ranking = open_model(choosing)
        sensitivity = rank_tensors(
            ranking,
            encodings,
            granularity=options.granularity,
            kinds=options.kinds,
            both_ways=options.both_ways,
            progress=progress,
        )
        if options.bound is None:
            container = _check_container(options.container, whole, ranking.reference, "choosing")
            return Bisection(sensitivity, len(choosing), container=container)
        checking = open_model(held_out)
        checking.record(encodings)
        measure = measure_sweep(checking, encodings)
        quality = measure(())
        container = _check_container(options.container, whole, checking.reference, "held out")
        search = PrecisionSearch(
            sensitivity.costs, options.bound.beside(quality), measure_sweep(ranking, encodings)
        )
        make = MixtureMaker(pipe, whole, folder, encodings, scratch)

        def build(proposal: Proposal) -> Divergence | None:
            return make.evaluate(proposal, checking.reference) if options.build else None

        tries = _find(search, measure, build, options.tries)
        if options.out is not None:
            make.export(tries[-1].proposal, options.out)
        pipe.manifest.save(pipe.manifest_path)  # of this pipeline again, not of a mixed one
    checks = (
        MixtureQuality("CPU", "choosing", sensitivity.whole),
        MixtureQuality("CPU", "held out", quality),
    )
    return Bisection(
        sensitivity, len(choosing), options.bound, len(held_out), checks, tries,
        options.out, _build_command(pipe, options.out), container,
    )  # fmt: skip


def recipe_of(
    source: Path,
    model: str | None,
    quantization: str,
    shape: tuple[int | None, int | None],
    target: str,
) -> tuple[str, dict[str, Any]]:
    """Return model and recipe for a model folder or a container.

    Args:
        source: folder of a model, or a container.
        model: that a container was built from.
        quantization: quantization recipe of a model; a container tells the options of its build.
        shape: AR and CL; None is the container's, or a suitable one for the model.
        target: of a model; a container has its own.

    Raises:
        WrongUseError: a container without its model, or with bits that the model does not tell.
        BuildError: the model or container cannot be read.
    """
    ar, cl = shape
    model_path = model or str(source)
    section: dict[str, Any] = {"recipe_name": quantization}
    if is_container(source):
        if model is None:
            raise WrongUseError(f"{source} has no weights in float: name its checkpoint, --model")
        container = GenAIContainer.load(source)
        graphs = container.metadata.graphs
        ar, cl = ar or max(graphs.auto_regression_numbers), cl or graphs.context_length
        target = container.metadata.target.name
        section = _quantization_of(container, find_model(model, Path.cwd())[0])
    recipe = yaml.safe_load(recipe_text(model_path, target))
    sizes = recipe["generator_config"]
    recipe["generator_config"] = {
        "sequence_length": ar or sizes["sequence_length"],
        "context_length": cl or sizes["context_length"],
    }
    recipe["stages"]["quantization"] = section
    return model_path, recipe


def _quantization_of(container: GenAIContainer, model: Path) -> dict[str, Any]:
    """Return the section `quantization` of a container's model, from the options of its build."""
    name = container.path.name
    source = find_source(model, None, calibrates=False)
    if isinstance(source, OnnxSource) and source.encodings is not None:
        return {"recipe_name": DEFAULT_RECIPE}  # its encodings decide
    if ENCODINGS_FILE in container.metadata.model.inputs:
        bits = str(container.precision).lower()
        if bits not in RECIPES:
            raise WrongUseError(
                f"{name} is {container.precision} by encodings that {model} has not: name the "
                "folder that it was built from, --model, or bisect its recipe"
            )
        print_remark(f"{name} was built from encodings that {model.name} has not: taking {bits}")
        return {"recipe_name": bits}
    group, techniques = "quantization.", "technique_kwargs."
    settings = {
        key.removeprefix(group): value
        for key, value in container.metadata.options.items()
        if key.startswith(group) and value is not None
    }
    recipe = str(settings.pop("recipe", DEFAULT_RECIPE))
    usual = QuantizationOptions(recipe=recipe).model_dump()
    options: dict[str, Any] = {}
    arguments: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        if key.startswith(techniques):
            technique, _, argument = key.removeprefix(techniques).partition(".")
            arguments.setdefault(technique, {})[argument] = value
        elif value != usual.get(key):
            options[key] = value
    return {"recipe_name": recipe, "options": options, "technique_kwargs": arguments}


def _models(pipe: LLMPipeline) -> tuple[Path, Path]:
    """Return the folders of the model in float and of the quantized one; make them if need be."""
    last = last_before_builder(pipe)
    if last not in pipe.completed:
        pipe.construct(until=last)
    model = pipe.outputs(last).get("model")
    if not isinstance(model, ModelFolder) or not model.quantized:
        raise PipelineError("no stage has quantized the model: name `quantization` in stages")
    return float_folder(pipe.outputs(pipe.completed[0])), model.path


def _build_command(pipe: LLMPipeline, out: Path | None) -> str:
    """Return the command that builds a model with the shapes of a pipeline."""
    if out is None:
        return ""
    settings = pipe.config.settings
    target = "SM8750" if settings.soc_details is None else parse_target(settings.soc_details)
    sizes = settings.generator_config
    shape = f"--ar 1,{sizes.sequence_length} --cl {sizes.context_length}"
    return f"qnnfarm build {out} --target {target} {shape} --out CONTAINER"


def _cut(
    pipe: LLMPipeline, whole: Path, chosen: tuple[str | None, int | None], options: BisectOptions
) -> tuple[list[Window], list[Window]]:
    """Return the windows that rank and choose, and those that check, none of which is the same."""
    text, most = pipe.text_to_compare(*chosen)
    if options.bound is None:
        return ComparedText(whole, options.choose_on or text, most).windows, []
    if options.choose_on is not None:
        choosing = ComparedText(whole, options.choose_on, most).windows
        return choosing, ComparedText(whole, text, most).windows
    windows = ComparedText(whole, text, None if most is None else 2 * most).windows
    if len(windows) < 2:
        raise WrongUseError(
            "the text has one window, and choosing a mixture and checking it need one each: name "
            "a longer text, or another to choose on"
        )
    checking = len(windows) - len(windows) // 2
    return windows[checking:], windows[:checking]


def _find(
    search: PrecisionSearch,
    measure: Measure,
    build: Callable[[Proposal], Divergence | None],
    most: int,
) -> tuple[Try, ...]:
    """Propose, check over held-out text, and raise more while a check fails.

    Args:
        measure: measures mixtures over that text by rounding the float model.
        build: measures a proposal that holds there as it is built; None if it is not built.
        most: proposals.
    """
    tries: list[Try] = []
    proposal: Proposal | None = search.propose()
    while proposal is not None:
        bound, quality = proposal.bound, measure(proposal.raised)
        checks = [
            MixtureQuality("CPU", "choosing", proposal.after),
            MixtureQuality("CPU", "held out", quality),
        ]
        if bound.holds(quality) and (emulated := build(proposal)) is not None:
            checks.append(MixtureQuality("HTP emulator", "held out", emulated))
        tries.append(Try(proposal, tuple(checks)))
        last = checks[-1].quality
        if bound.holds(last) or len(tries) == most:
            break
        proposal = search.extend(proposal, bound.value(last) - bound.value(proposal.after))
    return tuple(tries)


def _check_container(
    path: Path | None, whole: Path, reference: FloatLogits, windows: Literal["choosing", "held out"]
) -> MixtureQuality | None:
    """Evaluate a container that was given; None if it runs on a device alone."""
    if path is None or not GenAIContainer.load(path).metadata.target.emulator:
        return None
    outputs = {"container": path, "model": ModelFolder(whole, "")}
    return MixtureQuality("HTP emulator", windows, _run_container(outputs, reference))


def _run_container(outputs: Mapping[str, object], reference: FloatLogits) -> Divergence:
    with open_host_model(outputs, Path()) as model:  # a container needs no scratch folder
        return evaluate_model(model.loop, reference)
