"""The stages of a pipeline side by side: perplexity, divergence from float, and speed.

Stages run on this host over one text: float and quantized models on its CPU, a container for the
emulator on the HTP emulator, all by the same loop. A device runs the container by Genie: it scores
the same windows, its logits are compared with float at single decode steps, and its speed is what
Genie's own profile says. The host has no speed of a model's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.layout import CONFIG_FILE, MODEL_FILE, TOKENIZER_FILE
from buildlib.graph.interface import require_shape
from buildlib.numerics.evaluation import FloatLogits, evaluate_model, record_float
from buildlib.numerics.host_loop import open_onnx, window_losses
from harness.console import EMULATOR, Row, print_remark, print_rows
from harness.errors import ConfigFileError, PipelineError
from harness.results.metrics import METRICS
from harness.results.perplexity import (
    PERPLEXITY,
    PERPLEXITY_FLOAT,
    PERPLEXITY_QUANTIZED,
    standard_error,
)
from harness.runtimes.base import Window
from harness.runtimes.context_limit import ContextLimit
from harness.runtimes.windows import cut_windows
from harness.words import pluralize
from harness.workloads.base import UNRECORDED, Recording
from harness.workloads.generate import Generate
from harness.workloads.perplexity import score_text
from harness.workloads.session import Session
from harness.workloads.steps import (
    DEFAULT_STEP_WINDOWS,
    KL_DIVERGENCE,
    TOP1_AGREEMENT,
    compare_steps,
    cut_steps,
    model_steps,
)
from plugins.pipeline.host_model import HostModel, open_host_model
from plugins.pipeline.settings import EvaluatorConfig, MetricConfig
from plugins.pipeline.stage import ModelFolder

PREFILL, DECODE = "prefill_tokens_per_s", "decode_tokens_per_s"
_COLUMNS = {
    PERPLEXITY: "perplexity",
    KL_DIVERGENCE: "KL",
    TOP1_AGREEMENT: "top-1",
    PREFILL: "prefill",
    DECODE: "decode",
}
_ANSWER_TOKENS = 32
_WHERE = {
    "float": "CPU, float",
    "quantized": "CPU, quantized",
    "compiled": "HTP emulator, compiled",
}


@dataclass(frozen=True)
class StageQuality:
    """One stage, measured.

    Attributes:
        stage: name of the stage, or `device`.
        where: the processor that ran it.
        values: by key of `harness.results.metrics`; empty if it cannot run here.
        note: the reason that it cannot, or the sample of some values.
    """

    stage: str
    where: str
    values: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class PipelineComparison:
    """All stages, in order, over the same text.

    Attributes:
        windows: pieces of the text, each of the context length.
        tokens: tokens scored.
        emulator: whether the device was an emulator, whose speed says nothing about hardware.
    """

    stages: tuple[StageQuality, ...]
    windows: int
    tokens: int
    emulator: bool = False

    def print(self) -> None:
        """Print a table on stdout, and the size of the sample on stderr; float has no distance."""
        shown = [key for key in _COLUMNS if any(key in one.values for one in self.stages)]
        float_loss = next((one.values.get(PERPLEXITY) for one in self.stages), None)
        rows = []
        for one in self.stages:
            is_float = one.values == self.stages[0].values
            known = {PERPLEXITY} & one.values.keys() if is_float else one.values.keys()
            cells = [one.stage, one.where]
            cells += [METRICS[k].show(one.values[k]) if k in known else "-" for k in shown]
            perplexity = one.values.get(PERPLEXITY)
            away = f"{perplexity / float_loss - 1:+.2%}" if perplexity and float_loss else "-"
            away = "-" if is_float else away
            cells.insert(3, away)
            rows.append(Row(cells, [one.note] if one.note else []))
        labels = [_COLUMNS[key] for key in shown]
        headings = ("stage", "runs on", labels[0], "from float", *labels[1:])
        print_rows(headings, rows, right=set(headings[2:]))
        over = f"{pluralize(self.tokens, 'token')} in {pluralize(self.windows, 'window')}"
        print_remark(f"over {over}")
        if self.emulator:
            print_remark(EMULATOR)

    def as_document(self) -> dict[str, object]:
        """Return the comparison as JSON can hold it."""
        return asdict(self)


@dataclass(frozen=True)
class ComparedText:
    """The text of a comparison, cut for the model in float.

    Attributes:
        model: the folder of the model in float.
        most: so many windows at most; None: all.
    """

    model: Path
    text: str
    most: int | None

    @cached_property
    def windows(self) -> list[Window]:
        """The windows that Genie scores at the model's AR and CL."""
        shape = require_shape(self.model / MODEL_FILE)
        limit = ContextLimit(shape.cl, shape.ar)
        bos = bool(load_config(self.model / CONFIG_FILE).begin)
        return cut_windows(self.text, self.model / TOKENIZER_FILE, limit, self.most, bos=bos)


def float_folder(outputs: Mapping[str, object]) -> Path:
    """Return the folder of the float model that the first stage made."""
    folder = next(
        (value.path for value in outputs.values() if isinstance(value, ModelFolder)), None
    )
    if folder is None:
        raise PipelineError("the first stage has made no model to compare with")
    return folder


def compare_on_host(
    stages: Sequence[tuple[str, Mapping[str, object]]], text: ComparedText, scratch: Path
) -> PipelineComparison:
    """Evaluate the output of each stage on this host."""
    windows = text.windows
    config = load_config(text.model / CONFIG_FILE)
    tokens = [window.tokens for window in windows]
    rows: list[StageQuality] = []
    qualities: dict[object, StageQuality] = {}
    with record_float(text.model / MODEL_FILE, config, tokens) as reference:
        for name, outputs in stages:
            key = tuple(sorted((k, str(v)) for k, v in outputs.items()))
            if not qualities:  # the model in float, with or without encodings beside it
                qualities[key] = StageQuality(name, _WHERE["float"], reference.own().metrics)
            elif key not in qualities:
                qualities[key] = _evaluate(name, outputs, reference, scratch)
            rows.append(replace(qualities[key], stage=name))
    scored = sum(len(window.scored) for window in windows)
    return PipelineComparison(tuple(rows), len(windows), scored)


def _evaluate(
    name: str, outputs: Mapping[str, object], reference: FloatLogits, scratch: Path
) -> StageQuality:
    try:
        with open_host_model(outputs, scratch) as model:
            divergence = evaluate_model(model.loop, reference)
            return StageQuality(name, _WHERE[model.kind], divergence.metrics)
    except PipelineError as error:
        return StageQuality(name, "-", note=str(error))


def compare_on_device(
    session: Session,
    text: ComparedText,
    host: PipelineComparison,
    recording: Recording = UNRECORDED,
) -> StageQuality:
    """Measure a container on a leased device, by Genie, beside the host's figures."""
    scored = score_text(
        session, text.text, recording, windows=text.most, references=_references(host)
    )
    steps = cut_steps(text.windows[:DEFAULT_STEP_WINDOWS])
    config = load_config(text.model / CONFIG_FILE)
    with open_onnx(text.model / MODEL_FILE, config) as model:
        logits = model_steps(model, config, steps)
    divergence = compare_steps(session, text.text, steps, logits, recording)
    prompt = text.windows[0].text[: len(text.windows[0].text) // 2]
    tokens = min(_ANSWER_TOKENS, ContextLimit.of(session.container).context_length // 4)
    workload = Generate.of(prompt=prompt, max_tokens=tokens)
    workload.check(session.model)
    answer = workload.run(session, recording).output
    values = {PERPLEXITY: scored.output.perplexity}
    values |= {key: divergence.values[key] for key in (KL_DIVERGENCE, TOP1_AGREEMENT)}
    values |= {key: answer.metrics[key] for key in (PREFILL, DECODE) if key in answer.metrics}
    n_steps = sum(len(window.following) for window in steps)
    note = f"KL divergence and top-1 over {pluralize(n_steps, 'decode step')}; speed by Genie"
    return StageQuality("device", session.device_label, values, note)


def _references(host: PipelineComparison) -> dict[str, float]:
    """Return the host's perplexities by metric: in float, and of the latest quantized model."""
    references = {}
    for one in host.stages:
        key = PERPLEXITY_FLOAT if one.where == _WHERE["float"] else PERPLEXITY_QUANTIZED
        if one.values and one.where != _WHERE["compiled"]:
            references[key] = one.values[PERPLEXITY]
    return references


def score_on_host(model: HostModel, text: str, windows: int | None) -> tuple[float, float | None]:
    """Score a text on the host loop.

    Returns:
        The perplexity, `exp` of the mean negative log-likelihood of its tokens, and its standard
        error, None of one window.
    """
    begin = model.config.begin
    pieces = cut_windows(text, model.tokenizer, model.limit, windows, bos=bool(begin))
    losses = [float(window_losses(model.loop, begin, w.tokens).mean()) for w in pieces]
    # windows have as many tokens
    return math.exp(math.fsum(losses) / len(losses)), standard_error(losses)


def score_on_device(session: Session, text: str, windows: int | None) -> tuple[float, float | None]:
    """Score a text by Genie's accuracy API, as `score_on_host` does."""
    result = score_text(session, text, windows=windows).output
    return result.perplexity, result.error


def with_errors(scores: Mapping[str, tuple[float, float | None]]) -> dict[str, float]:
    """Return scores by display name, each error as `NAME_error` after its value."""
    values: dict[str, float] = {}
    for name, (value, error) in scores.items():
        values[name] = value
        if error is not None and f"{name}_error" not in scores:
            values[f"{name}_error"] = error
    return values


_LENGTH = "evaluator_config.context_length"


def with_windows_of(config: EvaluatorConfig, model: HostModel) -> HostModel:
    """Return a model of this host with the window length of the recipe."""
    length, longest = config.context_length, model.limit.context_length
    if length is None:
        return model
    if not model.limit.prefill_ar < length <= longest:
        reason = f"{length} is not between {model.limit.prefill_ar + 1} and {longest}"
        raise ConfigFileError("recipe", None, _LENGTH, f"{reason}, the context of the graphs")
    return replace(model, limit=replace(model.limit, context_length=length))


def refuse_other_windows(config: EvaluatorConfig, session: Session) -> None:
    """Check that the recipe's windows are those that Genie scores."""
    own = session.container.metadata.graphs.context_length
    if config.context_length not in {None, own}:
        reason = f"on a device windows have the container's {own} tokens; leave it out"
        raise ConfigFileError("recipe", None, _LENGTH, reason)


def read_dataset(metric: MetricConfig, folders: tuple[Path, ...]) -> str:
    """Read the text of a metric from the first folder that has it."""
    key = "evaluator_config.metrics.dataset"
    path = metric.find_text(folders)
    if path is None:
        places = " or ".join(map(str, dict.fromkeys(folders)))
        reason = f"there is no text file {metric.dataset} in {places}; nothing is downloaded"
        raise ConfigFileError("recipe", None, key, reason)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError("recipe", None, key, f"{path} cannot be read: {error}") from error
