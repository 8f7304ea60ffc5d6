"""Small decoders with all kinds of attention and random weights."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.checkpoint.tensor_file import StoredDtype, TensorRef
from buildlib.graph import interface
from buildlib.graph.builder import GraphBuilder
from buildlib.graph.files import save_model
from buildlib.graph.shape import GraphShape
from buildlib.graph.values import infer_shapes

SHAPE = GraphShape(4, 12)

_NUMPY: dict[StoredDtype, npt.DTypeLike] = {
    "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """One way to write a decoder down.

    Attributes:
        fused: queries, keys and values come from one projection, taken apart by this operator.
        by_output: weights are stored by output channel, for Gemm; else by input, for MatMul.
        bias: of the projections: none, the operator's own, or added after it.
        scale: where the attention is scaled.
        rotated: how many numbers of a head are rotated.
    """

    n_kv: int = 2
    group: int = 3
    head_dim: int = 8
    layers: int = 2
    hidden: int = 24
    vocab: int = 50
    fused: Literal["Split", "Slice"] | None = None
    by_output: bool = True
    bias: Literal["Gemm", "Add"] | None = None
    qk_norm: bool = False
    scale: Literal["query", "scores"] | None = "query"
    rotated: int = 8
    softcap: bool = False
    stored: StoredDtype = "F32"
    embeds: bool = False


@dataclass
class Decoder:
    """Writes a decoder of some kind."""

    kind: Kind
    folder: Path
    shape: GraphShape
    sparse: bool = False
    builder: GraphBuilder = field(default_factory=GraphBuilder)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))

    def write(self) -> Path:
        kind, op, shape = self.kind, self.builder.op, self.shape
        self.folder.mkdir(parents=True, exist_ok=True)
        dims: dict[str, tuple[int, ...]] = {
            interface.ATTENTION_MASK: (1, 1, shape.ar, shape.cl),
            interface.COS: (1, 1, shape.ar, kind.rotated // 2),
            interface.SIN: (1, 1, shape.ar, kind.rotated // 2),
        }
        for layer in range(kind.layers):
            dims[interface.past_key(layer, "in")] = (kind.n_kv, 1, kind.head_dim, shape.past)
            dims[interface.past_value(layer, "in")] = (kind.n_kv, 1, shape.past, kind.head_dim)
        self.inputs = {
            name: self.builder.input(name, ir.DataType.FLOAT, size) for name, size in dims.items()
        }
        if kind.embeds:
            size = (1, shape.ar, kind.hidden)
            hidden = self.builder.input(interface.INPUTS_EMBEDS, ir.DataType.FLOAT, size)
            source = hidden
        else:
            source = self.builder.input(interface.INPUT_IDS, ir.DataType.INT32, (1, shape.ar))
            hidden = op("Gather", [self.weight("embed", (kind.vocab, kind.hidden)), source], "e")
        outputs = []
        for layer in range(kind.layers):
            hidden, *caches = self.layer(hidden, f"layer_{layer}", layer)
            outputs += caches
        gain = self.weight("final_norm.weight", (kind.hidden,))
        hidden = op("RMSNormalization", [hidden, gain], "final_norm", axis=-1)
        logits = op("MatMul", [hidden, self.weight("head", (kind.hidden, kind.vocab))], "logits")
        model = self.builder.model([source, *self.inputs.values()], [logits, *outputs], "decoder")
        infer_shapes(model)
        return save_model(model, self.folder / "model.onnx")

    def layer(self, hidden: ir.Value, name: str, index: int) -> tuple[ir.Value, ...]:
        kind, op = self.kind, self.builder.op
        n_kv, group, dim = kind.n_kv, kind.group, kind.head_dim
        flat = op("Reshape", [hidden, self.builder.shape(-1, kind.hidden)], f"{name}_flat")
        widths = [n_kv * group * dim, n_kv * dim, n_kv * dim]
        if kind.fused:
            parts = self.taken_apart(self.project(flat, f"{name}_qkv", sum(widths)), widths, name)
        else:
            parts = [
                self.project(flat, f"{name}_{which}", width)
                for which, width in zip("qkv", widths, strict=True)
            ]
        query = self.rotate(self.heads(parts[0], f"{name}_q", group), f"{name}_q")
        key = self.rotate(self.heads(parts[1], f"{name}_k", 1), f"{name}_k")
        past = interface.past_key(index, "out"), interface.past_value(index, "out")
        new_key = op("Transpose", [key], past[0], perm=[0, 1, 3, 2])
        split = op("Reshape", [parts[2], self.builder.shape(-1, n_kv, 1, dim)], f"{name}_v_split")
        new_value = op("Transpose", [split], past[1], perm=[1, 2, 0, 3])
        taken = [self.inputs[interface.past_key(index, "in")], new_key]
        keys = op("Concat", taken, f"{name}_keys", axis=3)
        taken = [self.inputs[interface.past_value(index, "in")], new_value]
        values = op("Concat", taken, f"{name}_values", axis=2)
        scores = op("MatMul", [query, keys], f"{name}_scores")
        if kind.scale == "scores":
            scores = op("Mul", [scores, self.number("scale", dim**-0.5)], f"{name}_scaled")
        if kind.softcap:
            scores = op("Tanh", [scores], f"{name}_capped")
        scores = op("Add", [scores, self.inputs[interface.ATTENTION_MASK]], f"{name}_masked")
        weights = op("Softmax", [scores], f"{name}_weights", axis=-1)
        mixed = op("MatMul", [weights, values], f"{name}_mixed")
        mixed = op("Transpose", [mixed], f"{name}_by_token", perm=[2, 0, 1, 3])
        joined = op("Reshape", [mixed, self.builder.shape(-1, widths[0])], f"{name}_joined")
        out = self.weight(f"{name}_o.weight", (kind.hidden, widths[0]))
        residual = op("Gemm", [joined, out], f"{name}_o", transB=1)
        residual = op("Reshape", [residual, self.builder.shape(1, -1, kind.hidden)], f"{name}_back")
        return op("Add", [hidden, residual], f"{name}_output"), new_key, new_value

    def heads(self, flat: ir.Value, name: str, group: int) -> ir.Value:
        kind, op = self.kind, self.builder.op
        dims = self.builder.shape(-1, kind.n_kv, group, kind.head_dim)
        heads = op("Reshape", [flat, dims], f"{name}_split")
        heads = op("Transpose", [heads], f"{name}_heads", perm=[1, 2, 0, 3])
        if kind.qk_norm:
            gain = self.weight(f"{name}_norm.weight", (kind.head_dim,))
            heads = op("RMSNormalization", [heads, gain], f"{name}_normed", axis=-1)
        if kind.scale == "query" and group == kind.group:
            scale = self.number("scale", kind.head_dim**-0.5)
            heads = op("Mul", [heads, scale], f"{name}_scaled")
        return heads

    def rotate(self, heads: ir.Value, name: str) -> ir.Value:
        kind, op = self.kind, self.builder.op
        passed = []
        if kind.rotated < kind.head_dim:
            sizes = np.array([kind.rotated, kind.head_dim - kind.rotated])
            split = self.builder.constant("rotated_passed", sizes)
            heads, *passed = self.builder.ops(
                "Split", [heads, split], (f"{name}_rotary", f"{name}_passed"), axis=-1
            )
        names = f"{name}_first", f"{name}_second"
        first, second = self.builder.ops("Split", [heads], names, axis=-1, num_outputs=2)
        cos, sin = self.inputs[interface.COS], self.inputs[interface.SIN]
        turned = op("Mul", [first, cos], f"{name}_1"), op("Mul", [second, sin], f"{name}_2")
        left = op("Sub", list(turned), f"{name}_left")
        turned = op("Mul", [second, cos], f"{name}_3"), op("Mul", [first, sin], f"{name}_4")
        right = op("Add", list(turned), f"{name}_right")
        return op("Concat", [left, right, *passed], f"{name}_rotated", axis=-1)

    def project(self, flat: ir.Value, name: str, width: int) -> ir.Value:
        kind, op = self.kind, self.builder.op
        bias = [self.weight(f"{name}.bias", (width,))] if kind.bias else []
        own = bias if kind.bias == "Gemm" else []
        result = f"{name}_product" if kind.bias == "Add" else name
        if kind.by_output:
            weight = self.weight(f"{name}.weight", (width, kind.hidden))
            made = op("Gemm", [flat, weight, *own], result, transB=1)
        elif kind.bias == "Gemm":
            made = op(
                "Gemm", [flat, self.weight(f"{name}.weight", (kind.hidden, width)), *own], result
            )
        else:
            made = op("MatMul", [flat, self.weight(f"{name}.weight", (kind.hidden, width))], result)
        return op("Add", [made, *bias], name) if kind.bias == "Add" else made

    def taken_apart(self, fused: ir.Value, widths: list[int], name: str) -> list[ir.Value]:
        names = tuple(f"{name}_{which}" for which in "qkv")
        if self.kind.fused == "Split":
            sizes = self.builder.constant("qkv_widths", np.array(widths))
            return list(self.builder.ops("Split", [fused, sizes], names, axis=-1))
        found, start = [], 0
        for width, part in zip(widths, names, strict=True):
            ends = [
                self.builder.constant(f"at_{number}", np.array([number]))
                for number in (start, start + width, 1)
            ]
            found.append(self.builder.op("Slice", [fused, *ends], part))
            start += width
        return found

    def number(self, name: str, value: float) -> ir.Value:
        return self.builder.constant(name, np.array(value, np.float32))

    def weight(self, name: str, dims: tuple[int, ...]) -> ir.Value:
        """Appended to the one file of weights, behind some bytes that belong to no tensor."""
        dtype = np.dtype(_NUMPY[self.kind.stored])
        path = self.folder / "weights.bin"
        n_bytes = int(np.prod(dims)) * dtype.itemsize
        with path.open("ab") as file:
            file.write(bytes(12))
            offset = file.tell()
            if self.sparse:
                file.truncate(offset + n_bytes)
            else:
                scale = 1.0 if len(dims) == 1 or name == "embed" else dims[-1] ** -0.5
                file.write((self.rng.normal(size=dims) * scale).astype(dtype).tobytes())
        return self.builder.weight(TensorRef(name, self.kind.stored, dims, path, offset, n_bytes))


def make_decoder(
    folder: Path, kind: Kind, shape: GraphShape = SHAPE, *, sparse: bool = False
) -> Path:
    """Write a decoder of a kind, `folder/model.onnx`, with its weights in one file beside it.

    Sparse weights are all zero, and a hole in the file.
    """
    return Decoder(kind, folder, shape, sparse=sparse).write()
