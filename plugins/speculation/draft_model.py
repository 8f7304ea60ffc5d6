"""Eaglet's draft head: its form as ONNX, its encodings, and the hidden states that it reads.

The head has the inputs and outputs of a model part that looks no tokens up
(`buildlib.graph.interface`), with a few layers of its own caches, and besides

    hidden_states       [1, AR, hidden]     in: of the target after the token before each token
    last_hidden_states  [1, AR, hidden]     out: of the head, its guess of the target's next ones

The target gives `last_hidden_states` too. Genie copies integers between them, so all three have one
encoding.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.checkpoint.architectures import detect_architecture
from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.config import DecoderConfig
from buildlib.checkpoint.family_keys import family_keys, releases_of, stated_major
from buildlib.checkpoint.tensor_file import TensorRef, read_header
from buildlib.embedding.extraction import find_lookup, table_of
from buildlib.encodings.model import Encodings
from buildlib.errors import BuildError, ModelFileError
from buildlib.files import atomic_write_bytes
from buildlib.graph import interface
from buildlib.graph.builder import GraphBuilder
from buildlib.graph.decoder import decode
from buildlib.graph.files import load_model, save_model, tensor_array
from buildlib.graph.shape import GraphShape
from buildlib.graph.values import infer_shapes, static_shape
from buildlib.numerics.feeds import CallInputs, KvCache
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import Arrays, OnnxRunner
from buildlib.passes.base import SORTED, STATIC, Condition, Pass
from buildlib.quantize.calibration import Range, RangeObserver, instrument_ranges

DRAFT_FILE = "draft_model.onnx"
FC_FILE = "fc.safetensors"
FC_EMBEDDING = "fc.embedding.weight"
FC_HIDDEN = "fc.hidden.weight"
"""Matrices [hidden, hidden] on embeddings and hidden states, whose sum enters the first layer."""

_ROWS = frozenset({"Reshape", "Cast", "Gemm", "MatMul", "Add", "Mul", "Div", "Tanh"})
"""Operators between the final norm and the logits, which may be scaled and soft-capped."""
Array = npt.NDArray[np.float32]


def export_draft(head: Path, shape: GraphShape) -> Path:
    """Write `draft_model.onnx` for a trained head, beside its tensors.

    Args:
        head: a checkpoint folder of the target's family with the head's layers, tied to the
            target's output projection in place of an embedding; and `fc.safetensors` with the two
            matrices `fc.*`, which take rows of the target's embedding table, and hidden states.
    """
    checkpoint, matrices = Checkpoint.load(head), read_header(head / FC_FILE)
    config, builder = checkpoint.config, GraphBuilder()
    row = (1, shape.ar, config.hidden_size)
    shapes: dict[str, tuple[int, ...]]
    shapes = {interface.INPUTS_EMBEDS: row, interface.HIDDEN_STATES: row}
    shapes |= interface.input_shapes(config, shape)
    del shapes[interface.INPUT_IDS]
    inputs = {name: builder.input(name, ir.DataType.FLOAT, dims) for name, dims in shapes.items()}
    flat = builder.shape(-1, config.hidden_size)
    halves = [
        _projected(builder, inputs[name], flat, _tensor(head, matrices, weight))
        for name, weight in (
            (interface.INPUTS_EMBEDS, FC_EMBEDDING),
            (interface.HIDDEN_STATES, FC_HIDDEN),
        )
    ]
    both = builder.op("Add", halves, "fc_sum")
    hidden = builder.op("Reshape", [both, builder.shape(1, -1, config.hidden_size)], "fc")
    outputs = decode(builder, checkpoint, inputs, hidden)
    model = builder.model(list(inputs.values()), outputs, f"{config.model_type}_draft")
    infer_shapes(model)
    name_hidden_states(model)
    return save_model(model, head / DRAFT_FILE)


def _projected(
    builder: GraphBuilder, value: ir.Value, flat: ir.Value, weight: TensorRef
) -> ir.Value:
    rows = builder.op("Reshape", [value, flat], f"{value.name}_flat")
    return builder.op("Gemm", [rows, builder.weight(weight)], f"{value.name}_fc", transB=1)


def _tensor(head: Path, matrices: Mapping[str, TensorRef], name: str) -> TensorRef:
    if name not in matrices:
        raise ModelFileError(head / FC_FILE, f"the head has no {name}")
    return matrices[name]


def head_config(target: Mapping[str, Any], n_layers: int) -> dict[str, Any]:
    """Return the `config.json` of a head for that of its target.

    All layers of a head see the whole context and have rotary positions, those of the target's
    layers without a sliding window.
    """
    family, by_layer = detect_architecture(target), False
    if family is not None:
        release = stated_major(target) or releases_of(family.value)[0]
        by_layer = "layer_types" in family_keys(family.value, release).defaults
    return {
        **target,
        **({} if by_layer else {"sliding_window": None}),  # which Gemma 3 refuses as null
        "num_hidden_layers": n_layers,
        "layer_types": ["full_attention"] * n_layers,
        "no_rope_layers": [1] * n_layers,
    }


def _final_norm(model: ir.Model) -> ir.Value | None:
    """Add the final norm; return the input of the output projection, [1, AR, hidden]."""
    value = next((v for v in model.graph.outputs if v.name == interface.LOGITS), None)
    while value is not None and (node := value.producer()) is not None:
        if node.op_type not in _ROWS:
            dims = static_shape(value)
            return value if dims is not None and len(dims) == 3 else None
        value = node.inputs[0]
    return None


def name_hidden_states(model: ir.Model) -> None:
    """Make the hidden states after the final norm an output `last_hidden_states`, in place."""
    value = _final_norm(model)
    assert value is not None  # noqa: S101  (checked, or just built)
    value.name = interface.LAST_HIDDEN_STATES
    model.graph.outputs.insert(1, value)


def _no_norm(model: ir.Model) -> str | None:
    return None if _final_norm(model) is not None else "none leads to the logits alone"


class HiddenStatesOutput(Pass):
    """Adds the output `last_hidden_states`, which the output projection reads."""

    name = "hidden states"
    requires = (SORTED, STATIC, Condition("there are hidden states before the head", _no_norm))
    ensures = (SORTED, STATIC)

    def transform(self, model: ir.Model) -> ir.Model:
        """Change `model` in place."""
        name_hidden_states(model)
        return model


@dataclass(frozen=True)
class DraftHead:
    """A draft head as ONNX, checked against its target.

    Attributes:
        path: of the ONNX.
        n_layers: with caches of their own.
        n_vocab: tokens that it knows.
    """

    path: Path
    n_layers: int
    n_vocab: int

    @classmethod
    def load(cls, path: Path, config: DecoderConfig) -> "DraftHead":
        """Read the form of a head."""
        graph = load_model(path).graph
        dims_by_name = {str(v.name): static_shape(v) for v in (*graph.inputs, *graph.outputs)}
        shape = interface.require_shape(path)
        layers = {interface.kv_layer(name) for name in dims_by_name} - {None}
        row = (1, shape.ar, config.hidden_size)
        half = (1, 1, shape.ar, config.rotary_dim // 2)
        past = (config.num_key_value_heads, 1, config.head_dim, shape.past)
        expected: dict[str, tuple[int, ...]] = {
            interface.INPUTS_EMBEDS: row,
            interface.HIDDEN_STATES: row,
            interface.COS: half,
            interface.SIN: half,
            interface.LAST_HIDDEN_STATES: row,
            interface.past_key(0, "in"): past,
        }
        for name, dims in expected.items():
            if (own := dims_by_name.get(name)) != dims:
                state = "is missing" if own is None else f"is {list(own)}"
                reason = f"{name} {state}; a draft head of this model has it as {list(dims)}"
                raise ModelFileError(path, reason)
        logits = dims_by_name.get(interface.LOGITS)
        if logits is None or len(logits) != 3:
            raise ModelFileError(path, f"{interface.LOGITS} are not [1, AR, vocabulary]")
        return cls(path, len(layers), logits[2])

    def write_config(self, target: Path, path: Path) -> None:
        """Write the `config.json` of the head for that of its target."""
        values = head_config(json.loads(target.read_text(encoding="utf-8")), self.n_layers)
        atomic_write_bytes(path, json.dumps(values, indent=2).encode())


def shared_encodings(target: Encodings) -> Encodings:
    """Return encodings of a head's inputs and outputs that the target decides.

    Args:
        target: of the model with its hidden states as output, its table on the host.
    """
    by_name = target.by_name()
    states = by_name[interface.LAST_HIDDEN_STATES]
    inputs = states.model_copy(update={"name": interface.HIDDEN_STATES})
    return Encodings(activation_encodings=(states, inputs, by_name[interface.INPUTS_EMBEDS]))


def observe_draft(
    draft: Path,
    target: Path,
    config: DecoderConfig,
    windows: Sequence[Sequence[int]],
    scratch: Path,
) -> Mapping[str, Range]:
    """Observe ranges of a draft head behind its float target on a text.

    Args:
        draft: the head, at a prefill shape.
        target: the float model with its embedding table and the output `last_hidden_states`.
        windows: text in tokens.
        scratch: folder for a copy of the head.
    """
    shape = interface.require_shape(draft)
    ranges = RangeObserver()
    lookup = find_lookup(load_model(target))
    if lookup is None or table_of(lookup).const_value is None:
        raise ModelFileError(target, "it looks token ids up in no table")
    tensor = table_of(lookup).const_value
    assert tensor is not None  # noqa: S101  (just checked)
    table = tensor_array(tensor)
    runner = OnnxRunner(instrument_ranges(draft, scratch / "model.onnx"))
    inputs = CallInputs(config, shape.cl)
    has_calls = False
    for tokens, states in _hidden_states(target, config, windows):
        for begin in range(0, len(tokens) - shape.ar, shape.ar):
            ids = tokens[begin + 1 : begin + shape.ar + 1]
            feeds: dict[str, npt.NDArray[Any]] = inputs.at(shape.ar, 0, ids)
            feeds |= KvCache(runner.ports.inputs.values(), shape.cl).past(shape.past)
            feeds[interface.INPUTS_EMBEDS] = np.asarray(table[ids], np.float32)[None]
            feeds[interface.HIDDEN_STATES] = states[begin : begin + shape.ar][None]
            ranges.observe(runner.run(feeds), shape.ar)
            has_calls = True
    runner.close()
    if not has_calls:
        raise BuildError(
            f"cannot calibrate: no text of at least {shape.ar + 1} tokens for the draft head"
        )
    return ranges.ranges()


def _hidden_states(
    target: Path, config: DecoderConfig, windows: Sequence[Sequence[int]]
) -> Iterator[tuple[Sequence[int], Array]]:
    """Yield each window with the target's hidden states `[n, hidden]` after its tokens."""
    states: list[Array] = []

    def keep(outputs: Arrays, n_tokens: int) -> None:
        states.append(outputs[interface.LAST_HIDDEN_STATES][0, :n_tokens])

    shape = interface.require_shape(target)
    runner = OnnxRunner(target)
    off = {  # adapters, whose inputs are zero
        name: np.zeros(port.shape, np.float32)
        for name, port in runner.ports.inputs.items()
        if interface.LORA in name
    }
    with HostLoop({shape.ar: [runner]}, config, on_outputs=keep, constants=off) as loop:
        for window in windows:
            tokens = list(window[: len(window) // shape.ar * shape.ar])
            if not tokens:
                continue
            states.clear()
            loop.reset()
            loop.feed(tokens)
            yield tokens, np.concatenate(states)
