"""The reference text encoder: a small BERT that is made, not trained.

`python -m plugins.encoders.tiny_encoder FOLDER` writes it as exporters write encoders: `model.onnx`
with int64 inputs of any length, `config.json`, `tokenizer.json` and a text to calibrate on. Word
vectors and tokenizer are those of the reference model, so texts that share words are near each
other; the layers are drawn at random from one seed, so every machine writes the same file.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

from suites.models import tiny_llama

NAME = "tiny_encoder"
SIZES = {
    "hidden_size": 144,
    "intermediate_size": 288,
    "max_position_embeddings": 128,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "type_vocab_size": 2,
    "vocab_size": 1280,
}
_OPSET = 17
_WORDS = "model.embed_tokens.weight"
_SPREAD = 0.5
"""Standard deviation of the word vectors, beside which positions and types are small."""


class _Graph:
    """Nodes and initializers of the export."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(20_261_122)
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: dict[str, onnx.TensorProto] = {}

    def op(self, kind: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:  # noqa: ANN401
        self.nodes.append(helper.make_node(kind, inputs, [name], name, **attributes))
        return name

    def tensor(self, name: str, values: npt.ArrayLike, dtype: type = np.float32) -> str:
        self.tensors[name] = numpy_helper.from_array(np.asarray(values, dtype), name)
        return name

    def drawn(self, name: str, scale: float, *shape: int, around: float = 0.0) -> str:
        values = around + scale * self.random.standard_normal(shape)
        return self.tensor(name, values)

    def linear(self, data: str, name: str, n_in: int, n_out: int) -> str:
        weight = self.drawn(f"{name}.weight", n_in**-0.5, n_in, n_out)
        product = self.op("MatMul", [data, weight], f"{name}_product")
        return self.op("Add", [product, self.drawn(f"{name}.bias", 0.05, n_out)], name)

    def norm(self, data: str, name: str) -> str:
        width = SIZES["hidden_size"]
        scale = self.drawn(f"{name}.weight", 0.1, width, around=1.0)
        inputs = [data, scale, self.drawn(f"{name}.bias", 0.1, width)]
        return self.op("LayerNormalization", inputs, name, axis=-1, epsilon=1e-12)

    def embed(self) -> str:
        width = SIZES["hidden_size"]
        trained = load_file(tiny_llama.folder() / "model.safetensors")[_WORDS].astype(np.float32)
        words = self.tensor("words", trained * (_SPREAD / trained.std()))
        x = self.op("Gather", [words, "input_ids"], "embedded")
        types = self.drawn("types", 0.1, SIZES["type_vocab_size"], width)
        x = self.op(
            "Add", [x, self.op("Gather", [types, "token_type_ids"], "typed")], "embedded_typed"
        )
        positions = self.drawn("positions", 0.1, 1, SIZES["max_position_embeddings"], width)
        # As long as the text: shapes that are computed are what exports are full of.
        length = self.op("Gather", [self.op("Shape", ["input_ids"], "shape"), self.axis(1)], "n")
        end = self.op("Unsqueeze", [length, self.tensor("axis_0", [0], np.int64)], "end")
        ends = [self.tensor("start", [0], np.int64), end, self.tensor("axis_1", [1], np.int64)]
        placed = self.op("Slice", [positions, *ends], "placed")
        return self.norm(self.op("Add", [x, placed], "embedded_all"), "embedding_norm")

    def axis(self, number: int) -> str:
        return self.tensor(f"index_{number}", number, np.int64)

    def mask(self) -> str:
        axes = self.tensor("mask_axes", [1, 2], np.int64)
        mask = self.op("Unsqueeze", ["attention_mask", axes], "mask_4d")
        real = self.op("Cast", [mask], "mask_real", to=TensorProto.FLOAT)
        hidden = self.op("Sub", [self.tensor("one", 1.0), real], "mask_hidden")
        lowest = self.tensor("lowest", np.finfo(np.float32).min)
        return self.op("Mul", [hidden, lowest], "mask_bias")

    def attend(self, x: str, mask: str, layer: str) -> str:
        width, heads = SIZES["hidden_size"], SIZES["num_attention_heads"]
        shape = self.tensor("heads", [0, 0, heads, width // heads], np.int64)
        parts = {}
        for part, perm in (("query", (0, 2, 1, 3)), ("key", (0, 2, 3, 1)), ("value", (0, 2, 1, 3))):
            reshape = self.op(
                "Reshape",
                [self.linear(x, f"{layer}_{part}", width, width), shape],
                f"{layer}_{part}_heads",
            )
            parts[part] = self.op("Transpose", [reshape], f"{layer}_{part}_turned", perm=perm)
        scores = self.op("MatMul", [parts["query"], parts["key"]], f"{layer}_scores")
        root = self.tensor("root", np.sqrt(width / heads))
        scores = self.op("Div", [scores, root], f"{layer}_scaled")
        scores = self.op("Add", [scores, mask], f"{layer}_masked")
        weights = self.op("Softmax", [scores], f"{layer}_weights", axis=-1)
        mixed = self.op("MatMul", [weights, parts["value"]], f"{layer}_mixed")
        mixed = self.op("Transpose", [mixed], f"{layer}_back", perm=(0, 2, 1, 3))
        whole = self.tensor("whole", [0, 0, width], np.int64)
        mixed = self.op("Reshape", [mixed, whole], f"{layer}_joined")
        return self.linear(mixed, f"{layer}_attended", width, width)

    def feed_forward(self, x: str, layer: str) -> str:
        width, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
        wide = self.linear(x, f"{layer}_wide", width, inner)
        divided = self.op("Div", [wide, self.tensor("sqrt_2", np.sqrt(2.0))], f"{layer}_divided")
        bell = self.op("Erf", [divided], f"{layer}_erf")
        bell = self.op("Add", [bell, self.tensor("one", 1.0)], f"{layer}_erf_1")
        gated = self.op("Mul", [wide, bell], f"{layer}_gated")
        gated = self.op("Mul", [gated, self.tensor("half", 0.5)], f"{layer}_gelu")
        return self.linear(gated, f"{layer}_narrow", inner, width)


def build() -> onnx.ModelProto:
    """Build the model: hidden states [batch, tokens, 144] of tokens [batch, tokens]."""
    graph = _Graph()
    x, mask = graph.embed(), graph.mask()
    for number in range(SIZES["num_hidden_layers"]):
        layer = f"layer_{number}"
        total = graph.op("Add", [x, graph.attend(x, mask, layer)], f"{layer}_and_attended")
        x = graph.norm(total, f"{layer}_norm")
        total = graph.op("Add", [x, graph.feed_forward(x, layer)], f"{layer}_and_fed")
        x = graph.norm(total, f"{layer}_output_norm")
    graph.op("Identity", [x], "last_hidden_state")
    dims = ["batch_size", "sequence_length"]
    proto = helper.make_graph(
        graph.nodes,
        NAME,
        [
            helper.make_tensor_value_info(name, TensorProto.INT64, dims)
            for name in ("input_ids", "attention_mask", "token_type_ids")
        ],
        [
            helper.make_tensor_value_info(
                "last_hidden_state", TensorProto.FLOAT, [*dims, SIZES["hidden_size"]]
            )
        ],
        list(graph.tensors.values()),
    )
    opset = helper.make_opsetid("", _OPSET)
    return helper.make_model(proto, opset_imports=[opset], ir_version=8, producer_name="qnnfarm")


def write(folder: Path) -> Path:
    """Write the model into a folder, which is made, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(build(), folder / "model.onnx")
    config = {"architectures": ["BertModel"], "model_type": "bert", "pad_token_id": 0, **SIZES}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(tiny_llama.folder() / "tokenizer.json", folder / "tokenizer.json")
    (folder / "text").mkdir(exist_ok=True)
    text = tiny_llama.calibration_text()
    (folder / "text" / "calibration.txt").write_text(text, encoding="utf-8")
    return folder


def heldout_sentences(count: int = 50) -> tuple[str, ...]:
    """Return sentences of the held-out text, of 4 to 40 words."""
    parts = tiny_llama.heldout_text().replace("\n", " ").replace(";", ".").split(".")
    sentences = [" ".join(part.split()) for part in parts]
    return tuple(part for part in sentences if 4 <= len(part.split()) <= 40)[:count]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the model where the command line says."""
    parser = argparse.ArgumentParser(description="Write the reference text encoder.")
    parser.add_argument("folder", type=Path, help="it is made if need be")
    write(parser.parse_args(arguments).folder)


if __name__ == "__main__":
    main()
