"""Mutations of the ONNX file: its bytes, and its fields one by one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tests.fuzz.mutations import Rng, damaged, flipped, mutation, pick, rewrite

MODEL = "model.onnx"
_OPS = (
    "Add", "Conv", "If", "Loop", "Foo", "Gather", "Identity", "MatMul", "Relu", "Erf", "Softmax",
    "Reshape", "Cast", "QuantizeLinear", "DequantizeLinear", "Concat", "Split", "", "a\nb",
)  # fmt: skip
_DIMS = (-1, 0, 1, 2, 7, 9, 33, 1 << 20, 1 << 40, (1 << 63) - 1)
_NAMES = ("", "nothing", "a\nb", "logits", "input_ids", "x" * 100_000, "\N{SNOWMAN}", "../x")


def edited(path: Path, change: Callable[[onnx.ModelProto], str]) -> str:
    model = onnx.ModelProto.FromString(path.read_bytes())
    what = change(model)
    rewrite(path, model.SerializeToString())
    return what


@mutation(weight=6)
def onnx_damage(rng: Rng, folder: Path) -> str:
    path = folder / MODEL
    data, what = pick(rng, [damaged, flipped, flipped])(rng, path.read_bytes())
    rewrite(path, data)
    return f"{MODEL}: {what}"


@mutation(weight=3)
def initializer_shape(rng: Rng, folder: Path) -> str:
    def change(model: onnx.ModelProto) -> str:
        tensor = pick(rng, model.graph.initializer)
        old, dims = list(tensor.dims), list(tensor.dims)
        at = int(rng.integers(len(dims))) if dims else 0
        match pick(rng, ["dim", "append", "drop", "reverse", "dtype", "add"]):
            case "dim" if dims:
                dims[at] = pick(rng, _DIMS)
            case "append":
                dims.append(pick(rng, _DIMS))
            case "drop" if dims:
                del dims[at]
            case "reverse":
                dims.reverse()
            case "add" if dims:
                dims[at] += int(pick(rng, [-1, 1]))
            case _:
                tensor.data_type = int(rng.integers(0, 30))
        tensor.dims[:] = dims
        return f"initializer {tensor.name}: {old} to {dims}, type {tensor.data_type}"

    return edited(folder / MODEL, change)


@mutation(odd_weights=True, weight=3)
def external_reference(rng: Rng, folder: Path) -> str:
    def change(model: onnx.ModelProto) -> str:
        tensor = pick(rng, [one for one in model.graph.initializer if one.external_data])
        entry = pick(rng, tensor.external_data)
        old = entry.value
        if rng.random() < 0.1:
            entry.key = pick(rng, ["location", "offset", "length", "checksum", ""])
        elif entry.key == "location":
            entry.value = pick(rng, [
                "/etc/passwd", "../model.safetensors", "x/../model.safetensors", "", ".", "..",
                "\x00", "config.json", MODEL, "./model.safetensors", "y" * 5000, "a\nb",
                "/dev/zero",
            ])  # fmt: skip
        else:
            number = int(old)
            entry.value = pick(rng, [
                str(number + 1), str(number - 1), str(number + 4), "-1", "0", str(1 << 40),
                str(1 << 70), "abc", "", "1e3", " 8", "0x10", str(max(0, number - 64)),
            ])  # fmt: skip
        return f"{tensor.name}: {entry.key} {old} to {entry.value[:40]!r}"

    return edited(folder / MODEL, change)


@mutation(must_fail=True)
def external_path_escapes(rng: Rng, folder: Path) -> str:
    """Weights that are there, but not where a model may read."""
    (folder.parent / "outside.bin").write_bytes((folder / "model.safetensors").read_bytes())

    def change(model: onnx.ModelProto) -> str:
        tensor = pick(rng, [one for one in model.graph.initializer if one.external_data])
        location = pick(rng, ["../outside.bin", str(folder.parent / "outside.bin")])
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
        return f"{tensor.name} lies in {location}"

    return edited(folder / MODEL, change)


@mutation(odd_weights=True, weight=2)
def initializer_inline(rng: Rng, folder: Path) -> str:
    """A weight inside the model, of the right shape, with odd values or too few bytes."""

    def change(model: onnx.ModelProto) -> str:
        tensor = pick(rng, [one for one in model.graph.initializer if one.data_type == 1])
        values = rng.normal(size=list(tensor.dims)).astype(np.float32)
        kind = pick(rng, ["nan", "inf", "huge", "zero", "short", "both", "fine", "float_data"])
        odd = {"nan": np.nan, "inf": np.inf, "huge": 3e38, "zero": 0.0}.get(kind)
        if kind == "zero":
            values[...] = 0
        elif odd is not None:
            values.flat[int(rng.integers(values.size))] = odd
        external = list(tensor.external_data)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
        match kind:
            case "short":
                tensor.raw_data = tensor.raw_data[: int(rng.integers(len(tensor.raw_data)))]
            case "both":
                tensor.external_data.extend(external)
            case "float_data":
                tensor.float_data.extend([1.0, 2.0])
        return f"initializer {tensor.name} inline: {kind}"

    return edited(folder / MODEL, change)


@mutation(weight=5)
def node_change(rng: Rng, folder: Path) -> str:
    def change(model: onnx.ModelProto) -> str:
        nodes = model.graph.node
        at = int(rng.integers(len(nodes)))
        node = nodes[at]
        kind = pick(rng, sorted(_NODE_CHANGES))
        what = _NODE_CHANGES[kind](rng, model, node)
        return f"node {at} {node.op_type[:20]} {node.name[:40]!r}: {kind} {what}"

    return edited(folder / MODEL, change)


def _op(rng: Rng, model: onnx.ModelProto, node: onnx.NodeProto) -> str:
    node.op_type = pick(rng, _OPS)
    return repr(node.op_type)


def _domain(rng: Rng, model: onnx.ModelProto, node: onnx.NodeProto) -> str:
    node.domain = pick(rng, ["com.microsoft", "ai.onnx", "", "ai.onnx.ml", "a\nb"])
    return repr(node.domain)


def _name(rng: Rng, model: onnx.ModelProto, node: onnx.NodeProto) -> str:
    ends = node.output if rng.random() < 0.5 else node.input
    ends[int(rng.integers(len(ends)))] = name = pick(rng, _NAMES)
    return repr(name[:20])


def _rewire(rng: Rng, model: onnx.ModelProto, node: onnx.NodeProto) -> str:
    """Any value of the graph as an input: cycles, wrong shapes and wrong types come of it."""
    every = [name for other in model.graph.node for name in other.output]
    every += [value.name for value in model.graph.input]
    every += [value.name for value in model.graph.initializer]
    node.input[int(rng.integers(len(node.input)))] = name = pick(rng, every)
    return repr(name)


def _cycle(rng: Rng, model: onnx.ModelProto, node: onnx.NodeProto) -> str:
    node.input[int(rng.integers(len(node.input)))] = node.output[0]
    return "feeds itself"


def _remove(rng: Rng, model: onnx.ModelProto, node: onnx.NodeProto) -> str:
    kind = pick(rng, ["node", "input", "output", "inputs"])
    match kind:
        case "input":
            del node.input[int(rng.integers(len(node.input)))]
        case "output":
            del node.output[int(rng.integers(len(node.output)))]
        case "inputs":
            del node.input[:]
        case _:
            model.graph.node.remove(node)
    return kind


def _repeat(rng: Rng, model: onnx.ModelProto, node: onnx.NodeProto) -> str:
    kind = pick(rng, ["node", "input", "output"])
    match kind:
        case "input":
            node.input.append(node.input[0])
        case "output":
            node.output.append(node.output[0])
        case _:
            model.graph.node.append(node)
    return kind


def _swap(rng: Rng, model: onnx.ModelProto, node: onnx.NodeProto) -> str:
    node.input[:] = list(reversed(node.input))
    return "inputs reversed"


def _order(rng: Rng, model: onnx.ModelProto, node: onnx.NodeProto) -> str:
    nodes = list(model.graph.node)
    order = rng.permutation(len(nodes)).tolist()
    shuffled = [onnx.NodeProto.FromString(nodes[i].SerializeToString()) for i in order]
    del model.graph.node[:]
    model.graph.node.extend(shuffled)
    return "all nodes shuffled"


def _attribute(rng: Rng, model: onnx.ModelProto, node: onnx.NodeProto) -> str:
    name = pick(rng, [one.name for one in node.attribute] or ["axis", "perm", "transB"])
    kept = [one for one in node.attribute if one.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
    value: Any = pick(rng, [
        0, 1, -1, 2, 7, -9, 1 << 40, 0.0, -1.0, float("nan"), float("inf"), "x", [0, 1],
        [3, 2, 1, 0], [0, 0, 0, 0], [0, 2, 1, 3], [7], None,
    ])  # fmt: skip
    if value is not None:
        node.attribute.append(onnx.helper.make_attribute(name, value))
        if rng.random() < 0.1:
            node.attribute[-1].type = int(rng.integers(0, 15))
    return f"{name} = {value}"


def _subgraph(rng: Rng, model: onnx.ModelProto, node: onnx.NodeProto) -> str:
    inner = onnx.GraphProto.FromString(model.graph.SerializeToString())
    node.attribute.append(onnx.helper.make_attribute("body", inner))
    return "the whole graph as a subgraph"


_NODE_CHANGES: dict[str, Callable[[Rng, onnx.ModelProto, onnx.NodeProto], str]] = {
    "attribute": _attribute,
    "cycle": _cycle,
    "domain": _domain,
    "name": _name,
    "op": _op,
    "order": _order,
    "remove": _remove,
    "repeat": _repeat,
    "rewire": _rewire,
    "subgraph": _subgraph,
    "swap": _swap,
}


@mutation(weight=3)
def graph_end(rng: Rng, folder: Path) -> str:
    """Inputs and outputs of the graph."""

    def change(model: onnx.ModelProto) -> str:
        ends = model.graph.input if rng.random() < 0.6 else model.graph.output
        value = pick(rng, ends)
        dims = value.type.tensor_type.shape.dim
        kind = pick(rng, ["rename", "drop", "dim", "symbol", "type", "repeat", "rank", "shapeless"])
        old = value.name
        match kind:
            case "rename":
                value.name = pick(
                    rng, [*_NAMES, "past_key_7_in", "past_key_1_in", "attention_mask"]
                )
            case "drop":
                ends.remove(value)
            case "dim":
                dims[int(rng.integers(len(dims)))].dim_value = pick(rng, _DIMS)
            case "symbol":
                dims[int(rng.integers(len(dims)))].dim_param = "n"
            case "type":
                value.type.tensor_type.elem_type = int(rng.integers(0, 30))
            case "repeat":
                ends.append(value)
            case "rank":
                dims.add().dim_value = 1
            case _:
                value.type.tensor_type.ClearField("shape")
        return f"{old}: {kind} {value.name[:20]!r}"

    return edited(folder / MODEL, change)


@mutation(weight=2)
def model_field(rng: Rng, folder: Path) -> str:
    def change(model: onnx.ModelProto) -> str:
        kind = pick(rng, ["opset", "ir", "no opset", "value_info", "function", "metadata", "graph",
                          "sparse", "training", "doc", "names"])  # fmt: skip
        match kind:
            case "opset":
                model.opset_import[0].version = pick(rng, [-1, 0, 1, 7, 13, 17, 21, 22, 24, 99])
            case "ir":
                model.ir_version = pick(rng, [0, 1, 3, 7, 9, 11, 13, 99])
            case "no opset":
                del model.opset_import[:]
            case "value_info":
                name = pick(rng, [node.output[0] for node in model.graph.node])
                info = onnx.helper.make_tensor_value_info(name, 1, [int(pick(rng, _DIMS))])
                model.graph.value_info.append(info)
            case "function":
                function = model.functions.add()
                function.name, function.domain = "Gemm", ""
                function.node.append(onnx.helper.make_node("Gemm", ["a"], ["b"]))
            case "metadata":
                model.metadata_props.add().key = pick(rng, _NAMES)
            case "graph":
                model.ClearField("graph")
            case "sparse":
                model.graph.sparse_initializer.add()
            case "training":
                model.training_info.add()
            case "doc":
                model.doc_string = "d" * 1_000_000
            case _:
                model.graph.name = pick(rng, _NAMES)
        return f"model: {kind}"

    return edited(folder / MODEL, change)


@mutation()
def weights_exchanged(rng: Rng, folder: Path) -> str:
    """Swap two weights of one shape: another, sound model."""

    def change(model: onnx.ModelProto) -> str:
        external = [one for one in model.graph.initializer if one.external_data]
        one = pick(rng, external)
        other = pick(rng, [two for two in external if two.dims == one.dims])
        a = [(entry.key, entry.value) for entry in one.external_data]
        b = [(entry.key, entry.value) for entry in other.external_data]
        for tensor, entries in ((one, b), (other, a)):
            del tensor.external_data[:]
            for key, value in entries:
                tensor.external_data.add(key=key, value=value)
        return f"{one.name} and {other.name} exchanged"

    return edited(folder / MODEL, change)
