"""A Llama as Qualcomm's published notebooks lay it out, written anew from its public interface.

Every projection is a 1x1 convolution over [1, channels, 1, AR] instead of a matrix product; the
shape is fixed; keys are transposed. Either all heads are one tensor, or every key/value head has
inputs and outputs of its own (`past_key_0_h1_in`), as after a split into single heads.
"""

import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tools.exports.encodings import save_encodings
from tools.exports.genie import Cache, head_dim, mask, names, rope
from tools.exports.models import RECIPES, make_model, sample_tokens
from tools.exports.sample import Step, check_steps, save_sample, whole_text

_SHAPE = (4, 16)


@dataclass(frozen=True)
class Export:
    """One fixture: of which model, with inputs for each head, with an encodings file."""

    recipe: str
    per_head: bool
    encodings: bool


EXPORTS = {
    "notebook-llama-mha": Export("llama", per_head=False, encodings=True),
    "notebook-llama-heads": Export("llama-one-layer", per_head=True, encodings=False),
}


def _conv(linear: nn.Linear) -> nn.Conv2d:
    conv = nn.Conv2d(linear.in_features, linear.out_features, 1, bias=linear.bias is not None)
    conv.weight.data = linear.weight.data[:, :, None, None].clone()
    if linear.bias is not None:
        conv.bias.data = linear.bias.data.clone()
    return conv


class _Norm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight
        self.epsilon = norm.variance_epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mean = hidden.pow(2).mean(-1, keepdim=True)
        return hidden * torch.rsqrt(mean + self.epsilon) * self.weight


class _Layer(nn.Module):
    """One decoder layer: keys are [n_kv, 1, head_dim, n], values [n_kv, 1, n, head_dim]."""

    def __init__(self, layer: nn.Module, config: LlamaConfig) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.q, self.k = _conv(attention.q_proj), _conv(attention.k_proj)
        self.v, self.o = _conv(attention.v_proj), _conv(attention.o_proj)
        self.gate, self.up = _conv(mlp.gate_proj), _conv(mlp.up_proj)
        self.down = _conv(mlp.down_proj)
        self.before, self.after = (
            _Norm(layer.input_layernorm),
            _Norm(layer.post_attention_layernorm),
        )
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size = head_dim(config)

    def forward(
        self,
        hidden: torch.Tensor,
        seen: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        past_key: torch.Tensor,
        past_value: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the new hidden state, keys and values."""
        columns = self._columns(self.before(hidden))
        query = self._rotated(self._split(self.q(columns), self.heads), rotation)
        key = self._rotated(self._split(self.k(columns), self.kv_heads), rotation)
        value = self._split(self.v(columns), self.kv_heads)
        new_key = key.permute(1, 0, 3, 2)
        new_value = value.permute(1, 0, 2, 3)
        keys = torch.cat([past_key, new_key], 3).permute(1, 0, 2, 3)
        values = torch.cat([past_value, new_value], 2).permute(1, 0, 2, 3)
        group = self.heads // self.kv_heads
        keys = keys.repeat_interleave(group, 1)
        values = values.repeat_interleave(group, 1)
        scores = torch.matmul(query, keys) / math.sqrt(self.size) + seen
        attended = torch.matmul(torch.softmax(scores, -1), values)
        attended = attended.permute(0, 1, 3, 2).reshape(1, self.heads * self.size, 1, -1)
        hidden = hidden + self._rows(self.o(attended))
        columns = self._columns(self.after(hidden))
        gated = nn.functional.silu(self.gate(columns)) * self.up(columns)
        return hidden + self._rows(self.down(gated)), new_key, new_value

    @staticmethod
    def _columns(rows: torch.Tensor) -> torch.Tensor:
        return rows.unsqueeze(2).permute(0, 3, 2, 1)

    @staticmethod
    def _rows(columns: torch.Tensor) -> torch.Tensor:
        return columns.permute(0, 3, 2, 1).squeeze(2)

    def _split(self, columns: torch.Tensor, heads: int) -> torch.Tensor:
        """Reshape [1, heads*size, 1, AR] to [1, heads, AR, size]."""
        return columns.reshape(1, heads, self.size, -1).permute(0, 1, 3, 2)

    def _rotated(
        self, heads: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        cos, sin = rotation
        first, second = heads[..., : self.size // 2], heads[..., self.size // 2 :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Notebook(nn.Module):
    """The whole model on the interface of `genie.names`, or with one input per head."""

    def __init__(self, model: LlamaForCausalLM, *, per_head: bool) -> None:
        super().__init__()
        self.config = model.config
        self.embedding = model.model.embed_tokens
        self.layers = nn.ModuleList(_Layer(layer, model.config) for layer in model.model.layers)
        self.norm = _Norm(model.model.norm)
        self.head = _conv(model.lm_head)
        self.per_head = per_head

    def forward(
        self,
        input_ids: torch.Tensor,
        seen: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return logits, then the new keys and values."""
        hidden = self.embedding(input_ids)
        heads = self.config.num_key_value_heads if self.per_head else 1
        new: list[torch.Tensor] = []
        for index, layer in enumerate(self.layers):
            start = 2 * heads * index
            past_key = torch.cat(past[start : start + heads], 0)
            past_value = torch.cat(past[start + heads : start + 2 * heads], 0)
            hidden, key, value = layer(hidden, seen, (cos, sin), past_key, past_value)
            new += [*key.split(1, 0), *value.split(1, 0)] if self.per_head else [key, value]
        columns = self.norm(hidden).unsqueeze(2).permute(0, 3, 2, 1)
        return (self.head(columns).permute(0, 3, 2, 1).squeeze(2), *new)


def make(name: str, folder: Path) -> str:
    """Write one fixture; returns a line on it."""
    export = EXPORTS[name]
    recipe = RECIPES[export.recipe]
    model = make_model(recipe, "eager")
    tokens = sample_tokens(recipe)
    module = Notebook(model, per_head=export.per_head).eval().requires_grad_(requires_grad=False)
    steps = _steps(module, tokens)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path = folder / "model.onnx"
    given, wanted = steps[0]
    torch.onnx.export(
        module,
        tuple(given.values()),
        path,
        dynamo=False,
        input_names=list(given),
        output_names=list(wanted),
        opset_version=17,
    )
    onnx.checker.check_model(path)
    worst = check_steps(path, steps)
    save_sample(folder / "sample.npz", whole_text(model, tokens), steps)
    model.config.save_pretrained(folder)
    if export.encodings:
        save_encodings(path, [inputs for inputs, _ in steps], "1.0.0")
    size = sum(file.stat().st_size for file in folder.iterdir())
    return f"{name}: {size} bytes, ONNX Runtime differs from torch by {worst:.1e}"


def _steps(module: Notebook, tokens: torch.Tensor) -> list[Step]:
    """Return the text in chunks of AR tokens, the past filled from its end."""
    ar, cl = _SHAPE
    config = module.config
    heads = config.num_key_value_heads if module.per_head else 1
    inputs, outputs = (_per_head(kind, heads) for kind in names(config))
    cache = Cache.empty(config, cl - ar)
    steps: list[Step] = []
    for done in range(0, tokens.shape[1], ar):
        chunk = tokens[:, done : done + ar].int()
        past = [part for tensor in cache.tensors for part in tensor.chunk(heads, 0)]
        feed = (chunk, mask(done, ar, cl), *rope(config, torch.arange(done, done + ar)), *past)
        answer = module(*feed)
        given = dict(zip(inputs, feed, strict=True))
        steps.append((given, dict(zip(outputs, answer, strict=True))))
        new = answer[1:]
        joined = [torch.cat(new[i : i + heads], 0) for i in range(0, len(new), heads)]
        cache = cache.grown(joined)
    return steps


def _per_head(plain: list[str], heads: int) -> list[str]:
    if heads == 1:
        return plain
    result: list[str] = []
    for name in plain:
        stem, _, end = name.rpartition("_")
        is_cache = name.startswith("past_")
        result += [f"{stem}_h{head}_{end}" for head in range(heads)] if is_cache else [name]
    return result


def main() -> None:
    """Arguments: the folder of all fixtures, then names of fixtures (all when none)."""
    out = Path(sys.argv[1])
    for name in sys.argv[2:] or EXPORTS:
        print(make(name, out / name), flush=True)


if __name__ == "__main__":
    main()
