"""Search for what quantization costs in a pipeline, and for mixed precision within a bound.

The model in float is what the first stage made, the quantized one what the last stage before the
builder did. Tensors are ranked on this host's CPU, with their own encodings: a weight that a
technique has changed counts as changed. A mixture has the original weights at 8 bits where it
raises them, and the quantized model's own everywhere else. It is chosen on some windows of text and
checked on others: on the CPU, and then, as an option of the recipe's quantization, which runs again
with it, built for the emulator. A model that came with encodings follows no options: its mixture
itself is built. While a check fails, the next weights of the ranking are raised.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import yaml

from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.layout import CONFIG_FILE, ENCODINGS_FILE, MODEL_FILE
from buildlib.container.container import GenAIContainer
from buildlib.container.manifest import is_container
from buildlib.encodings.files import load_encodings
from buildlib.graph.files import load_model, save_model
from buildlib.numerics.divergence import Divergence
from buildlib.numerics.evaluation import FloatLogits, evaluate_model
from buildlib.pipeline.sources import OnnxSource, find_source
from buildlib.quantize.mixed_precision.proposal import (
    Measure,
    PrecisionSearch,
    Proposal,
    QualityBound,
    measure_sweep,
)
from buildlib.quantize.mixed_precision.sensitivity import (
    UNIT_KINDS,
    Granularity,
    UnitKind,
    rank_tensors,
)
from buildlib.quantize.mixed_precision.sweep import SensitivityModel, changed_weights
from buildlib.quantize.options import RECIPES, QuantizationOptions
from buildlib.targets import parse_target
from harness.console import print_remark
from harness.errors import PipelineError, WrongUseError
from harness.pipeline.bisection import Bisection, Check, Try
from harness.pipeline.comparison import ComparedText, float_folder
from harness.pipeline.defaults import recipe_text
from harness.pipeline.host_model import open_host_model
from harness.pipeline.hub import find_model
from harness.pipeline.llm import LLMPipeline
from harness.pipeline.mixture import BUILDER, MixtureMaker, last_before_builder
from harness.pipeline.stage import ModelFolder
from harness.runtimes.base import Window

DEFAULT_TRIES = 4
DEFAULT_RECIPE = "w8a16"


@dataclass(frozen=True)
class BisectOptions:
    """Tensors to rank, and those that may get more bits.

    Attributes:
        bound: to get within; None ranks only.
        granularity: by default tensors, and layers of large models.
        kinds: of tensors to rank; weights alone can get more bits.
        both_ways: measure too what the model gains if one alone is left in float.
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
    """Rank what the quantization of a pipeline's model costs, and propose mixed precision.

    Args:
        pipe: its stages up to the builder are run if they have not been.
        text: to measure on; by default the data set of the recipe's first metric.
        windows: pieces of it; by default as many as that metric has. With a bound they check the
            proposal, and as many others choose it.
        options: what to rank, and the bound.
        progress: called with (segments run, such in all) while tensors are ranked.

    Raises:
        PipelineError: no stage quantizes the model.
        WrongUseError: the text is too short.
        BuildError: a model cannot run, or the proposal not be built.
    """
    wanted = options or BisectOptions()
    made = _quantized(pipe)
    whole, folder = float_folder(made[0]), _last_model(made)
    choosing, held_out = _cut(pipe, whole, (text, windows), wanted)
    encodings = load_encodings(folder / ENCODINGS_FILE).by_name()
    changed = changed_weights(whole / MODEL_FILE, folder / MODEL_FILE)
    kept = pipe.cache_root / pipe.model_name
    with ExitStack() as stack:
        # Variants are put beside the model: not into an entry that other builds check.
        scratch = Path(stack.enter_context(TemporaryDirectory(dir=kept, prefix=".variants.")))
        model = save_model(load_model(whole / MODEL_FILE), scratch / MODEL_FILE)
        config = load_config(whole / CONFIG_FILE)

        def open_model(cut: Sequence[Window]) -> SensitivityModel:
            scored = [window.scored for window in cut]
            return stack.enter_context(SensitivityModel(model, config, scored, changed))

        ranking = open_model(choosing)
        found = rank_tensors(
            ranking,
            encodings,
            granularity=wanted.granularity,
            kinds=wanted.kinds,
            both_ways=wanted.both_ways,
            progress=progress,
        )
        if wanted.bound is None:
            given = _check_container(wanted.container, whole, ranking.reference, "choosing")
            return Bisection(found, len(choosing), container=given)
        checking = open_model(held_out)
        checking.record(encodings)
        make = MixtureMaker(pipe, whole, folder, encodings, scratch)
        verifier = _Verifier(make, wanted, checking.reference, measure_sweep(checking, encodings))
        quantized = verifier.measure(())
        given = _check_container(wanted.container, whole, checking.reference, "held out")
        search = PrecisionSearch(
            found.costs, wanted.bound.beside(quantized), measure_sweep(ranking, encodings)
        )
        tries = _find(search, verifier, wanted)
        if wanted.out is not None:
            make.export(tries[-1].proposal, wanted.out)
        pipe.manifest.save(pipe.manifest_path)  # of this pipeline again, not of a mixed one
    checks = (Check("CPU", "choosing", found.whole), Check("CPU", "held out", quantized))
    return Bisection(
        found, len(choosing), wanted.bound, len(held_out), checks, tries,
        wanted.out, _build_command(pipe, wanted.out), given,
    )  # fmt: skip


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
        quantization: quantization recipe of a model; a container tells the options of its build.
        shape: AR and CL; None is what the container has, or what suits the model.
        target: of a model; a container has its own.

    Raises:
        WrongUseError: a container without its model, or whose bits that model does not tell.
        BuildError: the model or container cannot be read.
    """
    ar, cl = shape
    named = model or str(source)
    section: dict[str, Any] = {"recipe_name": quantization}
    if is_container(source):
        if model is None:
            raise WrongUseError(f"{source} has no weights in float: name its checkpoint, --model")
        container = GenAIContainer.load(source)
        graphs = container.metadata.graphs
        ar, cl = ar or max(graphs.auto_regression_numbers), cl or graphs.context_length
        target = container.metadata.target.name
        section = _quantization_of(container, find_model(model, Path.cwd())[0])
    recipe = yaml.safe_load(recipe_text(named, target))
    sizes = recipe["generator_config"]
    recipe["generator_config"] = {
        "sequence_length": ar or sizes["sequence_length"],
        "context_length": cl or sizes["context_length"],
    }
    recipe["stages"]["quantization"] = section
    return named, recipe


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
    given = {
        key.removeprefix(group): value
        for key, value in container.metadata.options.items()
        if key.startswith(group) and value is not None
    }
    recipe = str(given.pop("recipe", DEFAULT_RECIPE))
    usual = QuantizationOptions(recipe=recipe).model_dump()
    options: dict[str, Any] = {}
    arguments: dict[str, dict[str, Any]] = {}
    for key, value in given.items():
        if key.startswith(techniques):
            technique, _, argument = key.removeprefix(techniques).partition(".")
            arguments.setdefault(technique, {})[argument] = value
        elif value != usual.get(key):
            options[key] = value
    return {"recipe_name": recipe, "options": options, "technique_kwargs": arguments}


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
        raise PipelineError("no stage has quantized the model: name `quantization` in stages")
    return model.path


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
    pipe: LLMPipeline, whole: Path, given: tuple[str | None, int | None], wanted: BisectOptions
) -> tuple[list[Window], list[Window]]:
    """Return the windows that rank and choose, and those that check, none of which is the same."""
    text, most = pipe.text_to_compare(*given)
    if wanted.bound is None:
        return ComparedText(whole, wanted.choose_on or text, most).windows, []
    if wanted.choose_on is not None:
        choosing = ComparedText(whole, wanted.choose_on, most).windows
        return choosing, ComparedText(whole, text, most).windows
    cut = ComparedText(whole, text, None if most is None else 2 * most).windows
    if len(cut) < 2:
        raise WrongUseError(
            "the text has one window, and choosing a mixture and checking it need one each: name "
            "a longer text, or another to choose on"
        )
    checking = len(cut) - len(cut) // 2
    return cut[checking:], cut[:checking]


def _find(search: PrecisionSearch, verifier: "_Verifier", wanted: BisectOptions) -> tuple[Try, ...]:
    """Propose, check, and raise more while a check fails."""
    tries: list[Try] = []
    proposal: Proposal | None = search.propose()
    while proposal is not None:
        checks = verifier.check(proposal)
        tries.append(Try(proposal, checks))
        bound, last = proposal.bound, checks[-1].found
        if bound.holds(last) or len(tries) == wanted.tries:
            break
        proposal = search.extend(proposal, bound.value(last) - bound.value(proposal.after))
    return tuple(tries)


@dataclass
class _Verifier:
    """Checks of proposals over held-out text: by the sweep, and if that holds, as they are built.

    Attributes:
        reference: logits in float over that text.
        measure: measures mixtures over it by rounding the float model.
    """

    make: MixtureMaker
    wanted: BisectOptions
    reference: FloatLogits
    measure: Measure

    def check(self, proposal: Proposal) -> tuple[Check, ...]:
        """Measure one."""
        found = self.measure(proposal.raised)
        checks = [Check("CPU", "choosing", proposal.after), Check("CPU", "held out", found)]
        if self.wanted.build and proposal.bound.holds(found):
            mixed = self.make.pipeline(proposal)
            if BUILDER in mixed.config.stages and mixed.config.settings.soc_details is not None:
                mixed.construct()
                found = _run_container(mixed.outputs(), self.reference)
                checks.append(Check("HTP emulator", "held out", found))
        return tuple(checks)


def _check_container(
    path: Path | None, whole: Path, reference: FloatLogits, windows: Literal["choosing", "held out"]
) -> Check | None:
    """Evaluate a container that was given; None if it runs on a device alone."""
    if path is None or not GenAIContainer.load(path).metadata.target.emulator:
        return None
    made = {"container": path, "model": ModelFolder(whole, "")}
    return Check("HTP emulator", windows, _run_container(made, reference))


def _run_container(made: Mapping[str, object], reference: FloatLogits) -> Divergence:
    with open_host_model(made, Path()) as model:  # a container needs no scratch folder
        return evaluate_model(model.loop, reference)
