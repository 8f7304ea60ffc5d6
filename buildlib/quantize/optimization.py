"""Techniques of a recipe, applied to a float model one after the other."""

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.entry_points import load_entry
from buildlib.graph.files import load_model, save_model
from buildlib.quantize.options import DOOR, StepName, TechniqueName
from buildlib.quantize.techniques import gptq
from buildlib.quantize.techniques.arguments import TechniqueArguments
from buildlib.quantize.techniques.base import FloatModel, WeightTechnique
from buildlib.quantize.techniques.layerwise import LayerwiseTechnique
from buildlib.quantize.techniques.rotation import Rotation
from buildlib.quantize.techniques.scaling import Scaling
from buildlib.quantize.techniques.spreading import Spreading

_TOKENS, _TOKENS_OF_WIDE_MODELS = 8192, 4096
_WIDE = 2048
_BATCH_TOKENS = 512


def techniques(
    arguments: TechniqueArguments, names: Iterable[StepName]
) -> Mapping[StepName, WeightTechnique]:
    """Return techniques by name: those here, and those of `names` that plugins have."""
    first, second = arguments.gptq, arguments.gptaq
    solve_gptq = partial(gptq.solve, arguments=first)
    solve_gptaq = partial(gptq.solve, arguments=second, to_float=True)
    ours: dict[StepName, WeightTechnique] = {
        "spreading": Spreading("spreading"),
        "splitting": Spreading("splitting", rotates=False),
        "scaling": Scaling("scaling"),
        "spinquant": Rotation("spinquant", arguments.spinquant.seed),
        "gptq": LayerwiseTechnique("gptq", solve_gptq, first.damping, math.inf),
        "gptaq": LayerwiseTechnique("gptaq", solve_gptaq, second.damping, second.float_text),
    }
    others = [name for name in names if name not in ours]
    return ours | {name: load_entry(DOOR, name)(name, getattr(arguments, name)) for name in others}


def optimize_weights(
    model: FloatModel,
    names: Sequence[StepName],
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
    arguments: TechniqueArguments | None = None,
) -> FloatModel:
    """Apply techniques in order, and write `model.onnx` with its weights into `folder`.

    Weights that a technique quantizes lie on their grids then: the encodings of the returned model
    have them, and quantize them to the same integers.

    Args:
        folder: on the file system of the model, so that unchanged weights are linked.
        progress: told (layers done, layers in all) of each technique.
    """
    arguments = arguments or TechniqueArguments()
    by_name, windows = techniques(arguments, names), model.token_windows
    n_calibrating = model.n_calibrating
    with tempfile.TemporaryDirectory(dir=folder, prefix=".techniques.") as scratch:
        # Techniques put files beside the model: not into an entry that other builds check.
        copy = save_model(load_model(model.path), Path(scratch) / "copy" / MODEL_FILE)
        model = model.changed(copy, model.encodings)
        for number, name in enumerate(names):
            step = Path(scratch) / str(number)
            step.mkdir()
            if name in {"spreading", "splitting", "scaling"}:
                token_windows = windows[:n_calibrating] or windows
            else:
                token_windows = _shown(windows, arguments.num_batches(name))
            whole = name == "scaling" or len(token_windows) == len(windows)
            last = number == len(names) - 1 and whole
            text = replace(
                model, token_windows=token_windows, n_calibrating=n_calibrating if last else 0
            )
            model = by_name[name].optimize(text, step, progress)
        path = save_model(load_model(model.path), folder / MODEL_FILE)
    return replace(model, path=path)


def _shown(windows: Sequence[Sequence[int]], num_batches: int | None) -> Sequence[Sequence[int]]:
    """Return as many windows, from all over the text, as so many batches take."""
    if num_batches is None or not windows:
        return windows
    length = len(windows[0])
    count = min(-(-num_batches * min(length, _BATCH_TOKENS) // length), len(windows))
    return [windows[index * len(windows) // count] for index in range(count)]


def calibration_tokens(hidden_size: int) -> int:
    """Return the tokens of text that techniques see by default.

    4096 for models from 2048 hidden states on: their layers take a second for some hundred tokens,
    and are damped for the few (`default_damping`). 8192 for others.
    """
    return _TOKENS_OF_WIDE_MODELS if hidden_size >= _WIDE else _TOKENS


def technique_windows(
    length: int, names: Iterable[TechniqueName], arguments: TechniqueArguments, hidden_size: int
) -> tuple[int, int]:
    """Return length and number of the windows of text for techniques.

    Windows are as long as those of calibration, which can be among them then. Those of AdaScale,
    which takes a step for each, have up to 512 tokens.
    """
    batch = min(length, _BATCH_TOKENS)
    each = batch if "adascale" in names else length
    default = -(-calibration_tokens(hidden_size) // batch)
    n_batches = max(arguments.num_batches(name) or default for name in names)
    return each, -(-n_batches * batch // each)
