"""Three layers of the reference model in half floats, in graphs as other runtimes have them.

Written node by node from its weights, beside the importers and passes of the product, and compiled
by PyPI's compiler. PowerServe's tensors are those that `setup_tensors` of its
`src/backend/qnn/graph_interface.cpp` checks; ExecuTorch's names are those of its published SM8650
binary.
"""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from buildlib.targets import parse_target
from buildlib.toolchains.base import GraphPorts, TensorInfo
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from suites.models import tiny_llama
from tests.buildlib.onnx_models import model_of
from tests.plugins.other_runtimes.executorch.pte import program_with
from tools.tiny_llama.architecture import Architecture
from tools.tiny_llama.gguf_file import write_gguf
from tools.tiny_llama.numpy_model import load_weights

FLOAT, HALF, INT = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT32
DTYPES = {FLOAT: "float32", HALF: "float16", INT: "int32"}
TARGET = parse_target("SM8750:emulator")
MODEL = replace(Architecture.load(tiny_llama.folder()), num_hidden_layers=3)
WEIGHTS = load_weights(tiny_llama.folder())
HEADS, KV, DIM = MODEL.num_attention_heads, MODEL.num_key_value_heads, MODEL.head_dim
Array = npt.NDArray[np.generic]


@dataclass
class Graph:
    """Nodes of a graph of one AR, and its inputs and outputs in their order."""

    ar: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)
    inputs: list[TensorInfo] = field(default_factory=list)
    outputs: list[TensorInfo] = field(default_factory=list)

    def take(self, name: str, kind: TensorProto.DataType, *shape: int) -> str:
        self.inputs.append(TensorInfo(name, shape, DTYPES[kind], None))
        return name

    def give(self, name: str, value: str, kind: TensorProto.DataType, *shape: int) -> None:
        self.outputs.append(TensorInfo(name, shape, DTYPES[kind], None))
        for node in self.nodes:
            for names in (node.input, node.output):
                names[:] = [name if one == value else one for one in names]

    def constant(self, values: object, dtype: npt.DTypeLike = np.float16) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.ascontiguousarray(np.asarray(values, dtype))
        return name

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:  # noqa: ANN401
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=f"{name}_node", **attributes))
        return name

    def reshape(self, value: str, *shape: int) -> str:
        return self.node("Reshape", value, self.constant(shape, np.int64))

    def slice(self, value: str, axis: int, first: int, end: int) -> str:
        places = [self.constant([number], np.int64) for number in (first, end, axis)]
        return self.node("Slice", value, *places)

    def linear(self, value: str, weight: Array) -> str:
        return self.node("MatMul", value, self.constant(weight.T))

    def norm(self, value: str, weight: str) -> str:
        square = self.node("Mul", value, value)
        mean = self.node("ReduceMean", square, self.constant([1], np.int64), keepdims=1)
        root = self.node("Sqrt", self.node("Add", mean, self.constant(MODEL.rms_norm_eps)))
        return self.node("Mul", self.node("Div", value, root), self.constant(WEIGHTS[weight]))

    def turned(self, value: str, cos: str, sin: str) -> str:
        a, b = (self.slice(value, 1, *ends) for ends in ((0, DIM // 2), (DIM // 2, DIM)))
        first = self.node("Sub", self.node("Mul", a, cos), self.node("Mul", b, sin))
        second = self.node("Add", self.node("Mul", a, sin), self.node("Mul", b, cos))
        return self.node("Concat", first, second, axis=1)

    def layer(
        self, x: str, number: int, mask: str, cos: str, sin: str, past: Sequence[str], padding: int
    ) -> tuple[str, list[str], list[str]]:
        """Add a layer; `past` has the keys `[DIM, slots]`, then the values `[slots, DIM]`."""
        prefix = f"model.layers.{number}"
        normed = self.norm(x, f"{prefix}.input_layernorm.weight")
        query, key, value = (
            np.split(WEIGHTS[f"{prefix}.self_attn.{name}_proj.weight"], count)
            for name, count in (("q", HEADS), ("k", KV), ("v", KV))
        )
        keys, values, mixed = [], [], []
        for head in range(KV):
            turned = self.turned(self.linear(normed, key[head]), cos, sin)
            keys.append(self.node("Mul", turned, self.constant(1 / math.sqrt(DIM))))
            values.append(self.linear(normed, value[head]))
            transposed = self.node("Transpose", keys[-1], perm=[1, 0])
            rows, columns = [past[head], transposed], [past[KV + head], values[-1]]
            if padding:
                rows.append(self.constant(np.zeros((DIM, padding))))
                columns.append(self.constant(np.zeros((padding, DIM))))
            all_keys = self.node("Concat", *rows, axis=1)
            all_values = self.node("Concat", *columns, axis=0)
            for number_ in range(head * HEADS // KV, (head + 1) * HEADS // KV):
                own = self.turned(self.linear(normed, query[number_]), cos, sin)
                scores = self.node("Add", self.node("MatMul", own, all_keys), mask)
                weights = self.node("Softmax", scores, axis=-1)
                mixed.append(self.node("MatMul", weights, all_values))
        joined = self.node("Concat", *mixed, axis=1)
        x = self.node("Add", x, self.linear(joined, WEIGHTS[f"{prefix}.self_attn.o_proj.weight"]))
        normed = self.norm(x, f"{prefix}.post_attention_layernorm.weight")
        gate = self.linear(normed, WEIGHTS[f"{prefix}.mlp.gate_proj.weight"])
        active = self.node("Mul", gate, self.node("Sigmoid", gate))
        up = self.linear(normed, WEIGHTS[f"{prefix}.mlp.up_proj.weight"])
        down = WEIGHTS[f"{prefix}.mlp.down_proj.weight"]
        return self.node("Add", x, self.linear(self.node("Mul", active, up), down)), keys, values

    def logits(self, x: str) -> str:
        return self.linear(self.norm(x, "model.norm.weight"), WEIGHTS["model.embed_tokens.weight"])

    def save(self, path: Path) -> None:
        inputs, outputs = (
            {one.name: (one.dtype, one.shape) for one in some}
            for some in (self.inputs, self.outputs)
        )
        model = model_of(self.nodes, inputs, outputs, self.constants)
        model.graph.name = path.stem
        onnx.save(model, path)


def powerserve_chunk(ar: int, layers: Sequence[int], slots: int, columns: int) -> Graph:
    graph = Graph(ar)
    x = graph.node("Cast", graph.take("x", FLOAT, ar, MODEL.hidden_size), to=HALF)
    mask = graph.take("attn_bias", HALF, ar, columns)
    cos, sin = (
        graph.node("Cast", graph.take(f"rope_embed_{name}", FLOAT, ar, DIM // 2), to=HALF)
        for name in ("cos", "sin")
    )
    past: dict[int, list[str]] = {layer: [] for layer in layers}
    for kind, shape in (("key_t", (DIM, slots)), ("value", (slots, DIM))):
        for layer in layers:
            names = [f"layer_{layer}_{kind}_cache_{head}" for head in range(KV)]
            past[layer] += [graph.take(name, HALF, *shape) for name in names]
    new: dict[str, str] = {}
    for layer in layers:
        x, keys, values = graph.layer(x, layer, mask, cos, sin, past[layer], columns - slots - ar)
        for kind, made in (("key", keys), ("value", values)):
            new |= {f"layer_{layer}_{kind}_{head}": value for head, value in enumerate(made)}
    graph.give("out", graph.node("Cast", x, to=FLOAT), FLOAT, ar, MODEL.hidden_size)
    for name, value in new.items():
        graph.give(name, value, HALF, ar, DIM)
    return graph


def powerserve_head(ar: int) -> Graph:
    graph = Graph(ar)
    x = graph.node("Cast", graph.take("x", FLOAT, ar, MODEL.hidden_size), to=HALF)
    logits = graph.node("Cast", graph.logits(x), to=FLOAT)
    graph.give("logits", logits, FLOAT, ar, MODEL.vocab_size)
    return graph


def executorch_model(ar: int, cl: int) -> Graph:
    graph, slots, layers = Graph(ar), cl - ar, MODEL.num_hidden_layers
    angles = np.outer(np.arange(cl + ar), MODEL.rope_theta ** (-np.arange(0, DIM, 2) / DIM))
    at = graph.reshape(graph.take("input_0_input_pos_0", INT, 1, ar), ar)
    ids = graph.reshape(graph.take("input_1_tokens_0", INT, 1, ar), ar)
    x = graph.node("Gather", graph.constant(WEIGHTS["model.embed_tokens.weight"]), ids, axis=0)
    cos, sin = (
        graph.node("Gather", graph.constant(table), at, axis=0)
        for table in (np.cos(angles), np.sin(angles))
    )
    mask = graph.reshape(graph.take("input_4_atten_mask_0", HALF, 1, 1, ar, cl), ar, cl)
    past: dict[int, list[str]] = {layer: [] for layer in range(layers)}
    for number, shape in ((0, (DIM, slots)), (layers, (slots, DIM))):
        for layer in range(layers):
            name = f"input_{5 + 2 * layer + (number > 0)}_args_{number + layer}_0"
            whole = graph.take(name, HALF, 1, KV, *shape)
            heads = [graph.slice(whole, 1, head, head + 1) for head in range(KV)]
            past[layer] += [graph.reshape(head, *shape) for head in heads]
    for layer in range(layers):
        x, keys, values = graph.layer(x, layer, mask, cos, sin, past[layer], 0)
        turned = [graph.node("Transpose", key, perm=[1, 0]) for key in keys]
        for number, (heads, shape) in enumerate(((values, (ar, DIM)), (turned, (DIM, ar)))):
            whole = graph.node("Concat", *heads, axis=0)
            output = graph.reshape(whole, 1, KV, *shape)
            graph.give(f"output_aten_{2 * layer + number}_0", output, HALF, 1, KV, *shape)
    logits = graph.node("Cast", graph.reshape(graph.logits(x), 1, ar, MODEL.vocab_size), to=FLOAT)
    graph.give("output_aten_squeeze_0", logits, FLOAT, 1, ar, MODEL.vocab_size)
    return graph


def compile_graphs(graphs: Sequence[Graph], binary: Path, names: Sequence[str]) -> Path:
    """Compile the graphs of a part, one for each AR, into one context binary without sharing.

    The converter puts `_` for the `@` of ExecuTorch's names, which the binary then gets back.
    """
    toolchain, dlcs, ports = OrtQnnToolchain(), [], {}
    (binary.parent / binary.stem).mkdir(parents=True)
    for graph, name in zip(graphs, names, strict=True):
        path = binary.parent / binary.stem / f"{name}.onnx"
        graph.save(path)
        dlcs.append(path.with_suffix(".dlc"))
        toolchain.convert(path, dlcs[-1], TARGET)
        ports[name] = GraphPorts(tuple(graph.inputs), tuple(graph.outputs))
    toolchain.compile(dlcs, binary, CompileConfig.for_target(TARGET), ports=ports)
    data = binary.read_bytes()
    for name in names:
        for one in (*ports[name].inputs, *ports[name].outputs):
            if one.name.startswith(("input_", "output_")):
                data = data.replace(f"{one.name}\0".encode(), f"{one.name[:-2]}@0\0".encode())
    binary.write_bytes(data)
    return binary


def write_pte(path: Path) -> Path:
    """Write a program of ExecuTorch with graphs of AR 1 and 8 at CL 64."""
    names = ("kv_forward", "prefill_forward")
    graphs = [executorch_model(ar, 64) for ar in (1, 8)]
    binary = compile_graphs(graphs, path.with_suffix(".bin"), names)
    path.write_bytes(program_with(binary.read_bytes()))
    return path


def write_powerserve(folder: Path) -> Path:
    """Write a model of PowerServe: two chunks and a head at batch sizes 1 and 8, 40 columns."""
    qnn, names = folder / "qnn", ("batch_1", "batch_8")
    qnn.mkdir(parents=True)
    entries = []
    for number, layers in enumerate(((0, 1), (2,))):
        graphs = [powerserve_chunk(ar, layers, 40, 56) for ar in (1, 8)]
        compile_graphs(graphs, qnn / f"tiny_{number}.bin", names)
        entries += [
            {
                "type": "transformers", "graph_name": f"batch_{ar}", "batch_size": ar,
                "start_layer_id": layers[0], "end_layer_id": layers[-1] + 1, "cache_size": 40,
                "context_size": 56, "kv_size": 0, "x_name": "x", "out_name": "out",
                "model_path": f"tiny_{number}.bin",
                "kv_path_format": "kv/layer_{layer_id}_{kv_type}_{head_id}.raw",
            }
            for ar in (1, 8)
        ]  # fmt: skip
    compile_graphs([powerserve_head(ar) for ar in (1, 8)], qnn / "lm_head.bin", names)
    head = {"model_path": "lm_head.bin", "x_name": "x", "out_name": "logits"}
    heads = [{**head, "graph_name": f"batch_{ar}", "batch_size": ar} for ar in (1, 8)]
    config = {"model_parameters": {"attention_mask_value": -1e5}, "graphs": entries[::-1]}
    (qnn / "config.json").write_text(json.dumps({**config, "embeddings": heads}))
    (folder / "ggml").mkdir()
    shutil.copy(write_gguf(folder / "ggml" / "weights.gguf"), folder / "vocab.gguf")
    rope = {"rope_dim": DIM, "rope_freq_base": MODEL.rope_theta, "rope_type": 0}
    llm = {"vocab_size": MODEL.vocab_size, "head_size": DIM, "rope_config": rope}
    model = {"version": 1, "model_arch": "llama", "model_id": "tiny", "llm_config": llm}
    (folder / "model.json").write_text(json.dumps(model))
    return folder
