"""Calibration of an encoder: windows of a text, ranges of activations, and rounded weights."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.checkpoint.tokenizer import load_tokenizer, spread_windows
from buildlib.encodings.model import Encodings
from buildlib.errors import InvalidOptionError
from buildlib.graph.files import load_model, save_model, tensor_array
from buildlib.graph.values import static_shape
from buildlib.numerics.runners import OnnxRunner, open_session, run_session
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.calibration import Range, RangeObserver, instrument_ranges
from buildlib.quantize.grids import ParameterUse, channel_axis
from buildlib.quantize.optimization import techniques
from buildlib.quantize.options import QuantizationOptions
from buildlib.quantize.recipe import check_blocks, matrix_uses
from buildlib.quantize.techniques.layerwise import LayerInputs, LayerwiseTechnique
from buildlib.quantize.weight_grids import encode_steps
from plugins.encoders import interface
from plugins.encoders.inputs import TextTokens, padded_inputs

if TYPE_CHECKING:
    import numpy.typing as npt

_WINDOWS, _SENTENCES, _WORDS = 32, 64, 32
_SHORTEST = 4
_ENDS = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\s*\n\s*")  # noqa: RUF001  (of Chinese sentences)
_MARGIN, _WIDE_BITS = 1.5, 16
_INPUT_BYTES = 256 << 20


def calibration_tokens(tokenizer: TextTokens, text: str) -> Iterator[list[int]]:
    """Yield a text as texts of all lengths: windows of it, its sentences, and their first words.

    What people embed is short, and the fewer the tokens the further their activations reach: in a
    mean of three there is more of `[CLS]` and `[SEP]` than in any window.
    """
    before, after = replace(tokenizer, template=("", "")).of(tokenizer.template)
    inner = max(1, tokenizer.length - len(before) - len(after))
    tokens = load_tokenizer(tokenizer.tokenizer).encode(text, add_special_tokens=False).ids
    for number, window in enumerate(spread_windows(tokens, inner, _WINDOWS, None)):
        shorter = max(_SHORTEST, inner * (1 + number % 7) // 8)
        yield [*before, *(window if number % 2 else window[:shorter]), *after]
    sentences = [part for part in _ENDS.split(text) if part.strip()]
    words = [" ".join(one.split()[: 1 + number % 3]) for number, one in enumerate(sentences)]
    yield from tokenizer.of([*_spread(sentences, _SENTENCES), *_spread(words, _WORDS)])


def _spread(texts: Sequence[str], count: int) -> list[str]:
    count = min(count, len(texts))
    return [texts[index * len(texts) // count] for index in range(count)]


def observe_encoder(
    model_path: Path,
    windows: Sequence[Sequence[int]],
    padding: int,
    folder: Path,
    bits: int = _WIDE_BITS,
) -> Mapping[str, Range]:
    """Run windows of tokens through an imported encoder and return the ranges of its activations.

    Those of 16 bits get half of the range on top: that costs half a bit of rounding, and a value
    beyond the range costs far more. Of a text of 5 tokens the cosine was 0.977 without.

    Args:
        model_path: as `import_encoder` writes it.
        windows: tokens, each at most as many as the model takes.
        padding: token that fills them.
        folder: for a copy of the model.
        bits: of activations.
    """
    runner = OnnxRunner(instrument_ranges(model_path, folder / "ranges.onnx"))
    length = runner.ports.inputs[interface.INPUT_IDS].shape[1]
    ranges = RangeObserver()
    for window in windows:
        ranges.observe(runner.run(padded_inputs(window, length, padding)), len(window))
    runner.close()
    margin = _MARGIN if bits == _WIDE_BITS else 1.0
    return {
        name: (low * margin if low < 0 else low, high * margin if high > 0 else high)
        for name, (low, high) in ranges.ranges().items()
    }


def rounding_technique(options: QuantizationOptions) -> LayerwiseTechnique | None:
    """Return what rounds the weights of an encoder, GPTQ by default; None for the nearest.

    Raises:
        InvalidOptionError: a technique for decoders, or several.
    """
    names = ("gptq",) if options.techniques is None else options.techniques
    by_name = techniques(options.technique_kwargs, names)
    found = [by_name[name] for name in names]
    if not found:
        return None
    (first, *others) = found
    if others or not isinstance(first, LayerwiseTechnique):
        reason = f"{', '.join(names)}: an encoder takes one of those that round layer by layer"
        raise InvalidOptionError("quantization.techniques", reason, ("gptq", "gptaq", "seqmse"))
    return first


def round_weights(
    model_path: Path,
    encodings: Encodings,
    windows: Sequence[Sequence[int]],
    padding: int,
    technique: LayerwiseTechnique,
    bits: Bitwidths,
    folder: Path,
) -> tuple[Path, Encodings]:
    """Put the weights of an encoder's matrices on grids, for small errors of their outputs.

    Each matrix sees its inputs in the float model: unlike a decoder's, an encoder's few layers are
    run again for each part of them that fits into memory. Weights that have an encoding, or several
    readers, stay as they are.

    Args:
        folder: for the model with its new weights, `model.onnx`.
    """
    model = load_model(model_path)
    bits.check_patterns({use.name for use in matrix_uses(model.graph)})
    uses = _open_uses(model.graph, encodings)
    check_blocks(uses, (), bits)
    readers: dict[str, list[ParameterUse]] = defaultdict(list)
    for use in uses:
        readers[_input_name(use)].append(use)
    made = []
    for name, seen in _inputs(model_path, readers, windows, padding, folder):
        inputs = LayerInputs(seen, seen, technique.damping)
        for use in readers[name]:
            axis, tensor = channel_axis(use.node, use.index) or 0, use.source.const_value
            assert tensor is not None  # noqa: S101  (an initializer)
            stored = tensor_array(tensor).astype(np.float32, copy=False)
            weights = np.ascontiguousarray(stored if axis == 0 else stored.T)
            fmt = bits.weight_format(use.name)
            solution = technique.solver(weights, fmt, inputs)
            values = solution.values if axis == 0 else np.ascontiguousarray(solution.values.T)
            use.source.const_value = ir.Tensor(values, name=use.name)
            made.append(encode_steps(use.name, solution.steps, fmt, axis))
    params = (*encodings.param_encodings, *made)
    path = save_model(model, folder / MODEL_FILE)
    return path, encodings.model_copy(update={"param_encodings": params})


def _open_uses(graph: ir.Graph, encodings: Encodings) -> list[ParameterUse]:
    given = encodings.by_name()
    return [
        use
        for use in matrix_uses(graph)
        if use.name not in given
        and len(static_shape(use.source) or ()) == 2
        and use.node.op_type != "Conv"
        and len(list(use.source.uses())) == 1
    ]


def _input_name(use: ParameterUse) -> str:
    data = use.node.inputs[0]
    assert data is not None  # noqa: S101  (of a matrix)
    return str(data.name)


def _inputs(
    model_path: Path,
    readers: Mapping[str, Sequence[ParameterUse]],
    windows: Sequence[Sequence[int]],
    padding: int,
    folder: Path,
) -> "Iterator[tuple[str, npt.NDArray[np.float32]]]":
    """Yield values by name with all their rows [tokens, in] over the windows, padding left out."""
    model = load_model(model_path)
    values = {str(value.name): value for node in model.graph for value in node.outputs}
    model.graph.outputs.extend(
        values[name] for name in readers if values[name] not in model.graph.outputs
    )
    path = save_model(model, folder / "inputs.onnx")
    session = open_session(path, plain=False)
    length = next(each.shape[1] for each in session.get_inputs())
    row_bytes = {name: 4 * (static_shape(values[name]) or (1,))[-1] for name in readers}
    open_names, n_tokens = list(readers), sum(map(len, windows))
    while open_names:
        names = [open_names.pop(0)]
        while open_names and n_tokens * sum(row_bytes[n] for n in (*names, open_names[0])) < (
            _INPUT_BYTES
        ):
            names.append(open_names.pop(0))
        rows: dict[str, list[npt.NDArray[np.float32]]] = {name: [] for name in names}
        for window in windows:
            results = run_session(path, session, names, padded_inputs(window, length, padding))
            for name, array in zip(names, results, strict=True):
                rows[name].append(array.reshape(-1, array.shape[-1])[-len(window) :])
        yield from ((name, np.concatenate(rows.pop(name))) for name in names)
