"""What options ask of a model's quantization, held against its encodings."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from buildlib.checkpoint.layout import ENCODINGS_FILE, MODEL_FILE
from buildlib.encodings.model import Encodings
from buildlib.graph.files import load_model
from buildlib.graph.values import is_parameter, source_of
from buildlib.options import QuantizationOptions
from buildlib.quantize.head import head_products
from buildlib.quantize.weights import channel_axis


def check_bits(options: QuantizationOptions) -> None:
    """See that options do not contradict each other.

    Raises:
        InvalidOptionError: they do.
    """
    from buildlib.quantize.complete import Bitwidths

    Bitwidths(**options.model_dump())


def decided_otherwise(folder: Path, options: QuantizationOptions, file: str) -> list[str]:
    """A line for each option that somebody set and that the encodings of a model do not follow.

    Options are of what has no encodings, so the encodings stay as they are.

    Args:
        folder: with the canonical model and its complete encodings.
        options: those set are looked at, not their defaults.
        file: what the encodings that were given are called.

    Raises:
        ModelFileError: there is no sound model.
        EncodingsError: nor sound encodings.
    """
    asked = options.model_fields_set & {"act_bitwidth", "param_bitwidth", "lpbq_block_size"}
    if not asked:
        return []
    found: dict[str, Counter[str]] = {}
    for key, what in _layers(folder, options):
        found.setdefault(key, Counter())[what] += 1
    lines = []
    for key in sorted(asked & found.keys()):
        value = getattr(options, key)
        others = ", ".join(f"{count} {what}" for what, count in found[key].most_common())
        lines.append(
            f"quantization.{key}={value} is for what has no encodings: {file} gives {others} in "
            "linear layers, which stay so"
        )
    return lines


def _layers(folder: Path, options: QuantizationOptions) -> Iterator[tuple[str, str]]:
    """(option, what there is in its place) of each tensor of a linear layer."""
    graph = load_model(folder / MODEL_FILE).graph
    encodings = Encodings.load(folder / ENCODINGS_FILE).by_name()
    heads = head_products(graph)
    for node in graph:
        if node in heads or len(node.inputs) < 2:
            continue
        data, weight = node.inputs[:2]
        if data is None or weight is None or channel_axis(node, 1) is None:
            continue
        if not is_parameter(weight):
            continue
        given = encodings.get(str(source_of(weight).name))
        if given is not None:
            if given.stored_bits != options.param_bitwidth:
                yield "param_bitwidth", f"weights of {given.stored_bits} bits"
            if given.block_size != options.lpbq_block_size:
                blocks = given.block_size
                yield (
                    "lpbq_block_size",
                    f"weights in blocks of {blocks}" if blocks else "weights without blocks",
                )
        made = encodings.get(str(data.name))
        if made is not None and made.bw != options.act_bitwidth:
            yield "act_bitwidth", f"activations of {made.bw} bits"
