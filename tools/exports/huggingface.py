"""Exports of transformers' models by torch's two exporters, named as Optimum names them.

Inputs `input_ids`, `attention_mask` [batch, past+new] and `position_ids`, unless the model makes
them itself, `past_key_values.<i>.key` and `.value` [batch, n_kv, past, head_dim]; outputs `logits`,
`present.<i>.key` and `.value` with past and new entries. Run inside an environment that has torch
and transformers.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx
import torch
from transformers import DynamicCache, PreTrainedModel

from tools.exports.encodings import save_encodings
from tools.exports.models import RECIPES, TOKENS, make_model, sample_tokens
from tools.exports.sample import Step, check_steps, save_sample, whole_text


@dataclass(frozen=True)
class Export:
    """One fixture: which model, how attention is written, which exporter.

    Attributes:
        takes: inputs other than the cache; transformers makes the absent ones from lengths.
        fixed: (new tokens, past entries) of an export with fixed dimensions.
        external: weights in a file of their own.
        encodings: format of an encodings file to make, or None.
    """

    recipe: str
    attention: Literal["eager", "sdpa"]
    dynamo: bool = False
    opset: int = 17
    takes: tuple[str, ...] = ("input_ids", "attention_mask", "position_ids")
    fixed: tuple[int, int] | None = None
    external: bool = False
    encodings: Literal["0.6.1", "1.0.0"] | None = None
    weights: bool = False


EXPORTS = {
    "torchscript-llama": Export("llama", "eager", encodings="0.6.1"),
    "dynamo-llama": Export("llama", "sdpa", dynamo=True, opset=18, external=True),
    "torchscript-qwen2": Export("qwen2", "sdpa", weights=True),
    "dynamo-qwen2": Export("qwen2", "eager", dynamo=True, opset=20),
    "torchscript-llama-fixed": Export("llama3-rope", "sdpa", fixed=(4, 8), external=True, opset=14),
    "torchscript-qwen3": Export("qwen3", "eager", weights=True),
    "dynamo-mistral": Export("mistral", "sdpa", dynamo=True, opset=18),
    "dynamo-phi3": Export("phi3", "eager", dynamo=True, opset=18),
    "dynamo-llama-yarn": Export("llama-yarn", "sdpa", dynamo=True, opset=18),
    "dynamo-phi3-longrope": Export("phi3-longrope", "sdpa", dynamo=True, opset=18),
    "dynamo-gemma2": Export("gemma2", "eager", dynamo=True, opset=18),
    "dynamo-llama-ids": Export("llama", "sdpa", dynamo=True, opset=18, takes=("input_ids",)),
    "torchscript-qwen3-ids-mask": Export("qwen3", "eager", takes=("input_ids", "attention_mask")),
}


class WithCache(torch.nn.Module):
    """The model with its key/value cache as plain inputs and outputs."""

    def __init__(self, model: PreTrainedModel, takes: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.takes = takes

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model; behind what it takes stand key and value of each layer in turn."""
        given, past = inputs[: len(self.takes)], inputs[len(self.takes) :]
        cache = DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        result = self.model(
            **dict(zip(self.takes, given, strict=True)), past_key_values=cache, use_cache=True
        )
        present = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        return (result.logits, *present)

    def fed(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Return those of ids, mask and positions that it takes."""
        names = ("input_ids", "attention_mask", "position_ids")
        return [value for name, value in zip(names, inputs, strict=True) if name in self.takes]


def make(name: str, folder: Path) -> str:
    """Write one fixture; returns a line on it."""
    export = EXPORTS[name]
    recipe = RECIPES[export.recipe]
    model = make_model(recipe, export.attention)
    module = WithCache(model, export.takes).eval()
    tokens = sample_tokens(recipe)
    steps = _steps(module, tokens, export.fixed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path = folder / "model.onnx"
    _export(module, path, export)
    tidy(path, external=export.external)
    worst = check_steps(path, steps)
    save_sample(folder / "sample.npz", whole_text(model, tokens), steps)
    model.config.save_pretrained(folder)
    if export.weights:
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
    if export.encodings:
        save_encodings(path, [inputs for inputs, _ in steps], export.encodings)
    for file in folder.iterdir():
        file.chmod(0o644)
    size = sum(file.stat().st_size for file in folder.iterdir())
    return f"{name}: {size} bytes, ONNX Runtime differs from torch by {worst:.1e}"


def _names(module: WithCache) -> tuple[list[str], list[str]]:
    layers = module.model.config.num_hidden_layers
    kinds = [(layer, kind) for layer in range(layers) for kind in ("key", "value")]
    inputs = [*module.takes, *(f"past_key_values.{layer}.{kind}" for layer, kind in kinds)]
    return inputs, ["logits", *(f"present.{layer}.{kind}" for layer, kind in kinds)]


def _steps(module: WithCache, tokens: torch.Tensor, fixed: tuple[int, int] | None) -> list[Step]:
    """Return a prompt and two calls of one token, or calls of the fixed length.

    With fixed dimensions the past is filled from its end and the mask hides the rest.
    """
    config = module.model.config
    inputs, outputs = _names(module)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    room = fixed[1] if fixed else 0
    n_caches = 2 * config.num_hidden_layers
    cache = [torch.zeros(1, config.num_key_value_heads, room, head) for _ in range(n_caches)]
    chunks = tokens.split(fixed[0], 1) if fixed else tokens.split([TOKENS - 2, 1, 1], 1)
    steps: list[Step] = []
    done = 0
    for chunk in chunks:
        new = chunk.shape[1]
        past = cache[0].shape[2]
        mask = torch.ones(1, past + new, dtype=torch.int64)
        mask[:, : past - done] = 0
        feed = (*module.fed(chunk, mask, torch.arange(done, done + new)[None]), *cache)
        answer = module(*feed)
        given = dict(zip(inputs, feed, strict=True))
        steps.append((given, dict(zip(outputs, answer, strict=True))))
        done += new
        cache = [tensor[:, :, -room:] if fixed else tensor for tensor in answer[1:]]
    return steps


def _export(module: WithCache, path: Path, export: Export) -> None:
    config = module.model.config
    inputs, outputs = _names(module)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    new, past = export.fixed or (3, 5)
    n_caches = 2 * config.num_hidden_layers
    cache = [torch.zeros(1, config.num_key_value_heads, past, head) for _ in range(n_caches)]
    mask = torch.ones(1, past + new, dtype=torch.int64)
    positions = torch.arange(past, past + new)[None]
    args = (*module.fed(torch.ones(1, new, dtype=torch.int64), mask, positions), *cache)
    if export.dynamo:
        free = torch.export.Dim.DYNAMIC
        shapes = (tuple([{1: free} for _ in module.takes] + [{2: free} for _ in cache]),)
        torch.onnx.export(
            module,
            args,
            path,
            dynamo=True,
            input_names=inputs,
            output_names=outputs,
            dynamic_shapes=shapes,
            opset_version=export.opset,
            external_data=export.external,
            verbose=False,
        )
        return
    axes = {name: {0: "batch_size", 1: "sequence_length"} for name in (*module.takes, "logits")}
    if "attention_mask" in axes:
        axes["attention_mask"] = {0: "batch_size", 1: "past_sequence_length + sequence_length"}
    kept = inputs[len(module.takes) :]
    axes |= {name: {0: "batch_size", 2: "past_sequence_length"} for name in kept}
    total = "past_sequence_length + sequence_length"
    axes |= {name: {0: "batch_size", 2: total} for name in outputs[1:]}
    torch.onnx.export(
        module,
        args,
        path,
        dynamo=False,
        input_names=inputs,
        output_names=outputs,
        dynamic_axes=None if export.fixed else axes,
        opset_version=export.opset,
    )


def tidy(path: Path, *, external: bool = False) -> None:
    """Drop what only names the exporting machine (stack traces); move weights out if asked."""
    model = onnx.load(path)
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for value in (*model.graph.value_info, *model.graph.input, *model.graph.output):
        del value.metadata_props[:]
    del model.graph.metadata_props[:]
    for file in path.parent.glob("model.onnx*"):
        file.unlink()
    onnx.save(
        model,
        path,
        save_as_external_data=external,
        location="model.onnx_data",
        size_threshold=256,
    )


def main() -> None:
    """Arguments: the folder of all fixtures, then names of fixtures (all when none)."""
    out = Path(sys.argv[1])
    for name in sys.argv[2:] or EXPORTS:
        print(make(name, out / name), flush=True)


if __name__ == "__main__":
    main()
