"""The reference model with the outliers of real ones, written into its weights without training.

`write` makes a checkpoint whose logits are those of `suites.models.tiny_llama`, up to rounding, and
whose activations are as bad as those of models that people use:

- **Keys.** Of each head two rotary pairs are large, and `q_proj` is small there. Four more pairs
  turn so slowly that no position shows, and keys are nothing but a bias there, as Qwen 2 has them:
  145 in one head. Softmax takes no notice of what all keys have in common.
- **Values.** A channel of each head is large, and the columns of `o_proj` that read it are small.
- **The residual stream.** The MLP of the first layer writes a massive number into a channel of its
  own at the first token, and nowhere else (Sun et al., Massive Activations in Large Language
  Models, arXiv 2402.17762). Every norm then leaves little but that channel of the first token, and
  all projections read from it what they read before: the token is always the same, and so is what
  it computes.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from suites.models import tiny_llama

Array = npt.NDArray[np.float64]
KEY_BIAS, MASSIVE = 145.0, 20000.0
_MORE = 48
"""Channels that the residual stream and the MLP have more: all widths can be divided by 32."""
_SLOW, _UNTURNED = 4, 1e9
_KEYS, _VALUES = 60.0, 60.0
_MARK, _GIANT, _UNIT = 0, 1, 0
"""New channels: the mark of the first token, and the massive one; and the MLP's unit behind it."""


SLOW_CHANNEL = 12
"""Of a head: the first of the pairs whose keys are nothing but a bias; the bias is the largest."""


def write(folder: Path) -> Path:
    """Write the checkpoint, with tokenizer, settings and texts of the reference model."""
    source = tiny_llama.folder()
    config = json.loads((source / "config.json").read_text("utf-8"))
    old = {
        name.removeprefix("model."): tensor.astype(np.float64)
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    new, changed = _Outliers(config, old).tensors(), _changed_config(config)
    shutil.copytree(
        source,
        folder,
        ignore=shutil.ignore_patterns("*.py", "__pycache__", "lora", "ssd", "eaglet"),
    )
    (folder / "config.json").write_text(json.dumps(changed, indent=2), "utf-8")
    save_file(
        {name: tensor.astype(np.float32) for name, tensor in new.items()},
        folder / "model.safetensors",
    )
    return folder


def _changed_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration: wider, with biases, and with pairs that do not turn."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    more = dim + 2 * _SLOW
    theta = config["rope_theta"] ** (more / dim)  # the same frequencies of the first pairs
    slowest = 2 * math.pi * theta ** ((dim - 2) / more)
    length = config["max_position_embeddings"] // 2
    return config | {
        "hidden_size": hidden + _MORE,
        "intermediate_size": config["intermediate_size"] + _MORE,
        "head_dim": more,
        "rms_norm_eps": config["rms_norm_eps"] * hidden / (hidden + _MORE),
        "rope_theta": theta,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": _UNTURNED,
            "low_freq_factor": length / (slowest * 1.9),
            "high_freq_factor": length / (slowest * 1.1),
            "original_max_position_embeddings": length,
        },
        "attention_bias": True,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


class _Outliers:
    """Tensors of the new model, made of those of the old one.

    While it makes them it follows the first token, bos, through both: `token` is its residual
    stream in the old model, `stream` that in the new one.
    """

    def __init__(self, config: dict[str, Any], old: dict[str, Array]) -> None:
        self.old = old
        self.hidden, self.dim = config["hidden_size"], config["head_dim"]
        self.kv, self.heads = config["num_key_value_heads"], config["num_attention_heads"]
        self.eps = config["rms_norm_eps"]
        self.n_layers = config["num_hidden_layers"]
        self.bos = config["bos_token_id"]

    def tensors(self) -> dict[str, Array]:
        """Return all of them by name."""
        table = np.pad(self.old["embed_tokens.weight"], ((0, 0), (0, _MORE)))
        table[self.bos, self.hidden + _MARK] = np.abs(table[self.bos]).max()
        self.token = self.old["embed_tokens.weight"][self.bos]
        self.stream = table[self.bos]
        new = {"model.embed_tokens.weight": table}
        for layer in range(self.n_layers):
            new |= {f"model.layers.{layer}.{name}": one for name, one in self._layer(layer).items()}
        norm = self.old["norm.weight"]
        new["model.norm.weight"] = self._gain(norm)
        head = self.old["embed_tokens.weight"]
        new["lm_head.weight"] = self._read(head, norm)
        return new

    def _layer(self, layer: int) -> dict[str, Array]:
        old = {
            name.removeprefix(f"layers.{layer}."): one
            for name, one in self.old.items()
            if name.startswith(f"layers.{layer}.")
        }
        gain = old["input_layernorm.weight"]
        new = {"input_layernorm.weight": self._gain(gain)}
        query, key, value = (self._read(old[f"self_attn.{one}_proj.weight"], gain) for one in "qkv")
        new |= self._attention(query, key, value, old["self_attn.o_proj.weight"], layer)
        values = (old["self_attn.v_proj.weight"] @ self._normed(gain)).reshape(self.kv, -1)
        attended = np.repeat(values, self.heads // self.kv, axis=0).reshape(-1)
        self._add(old["self_attn.o_proj.weight"] @ attended)

        gain = old["post_attention_layernorm.weight"]
        new["post_attention_layernorm.weight"] = self._gain(gain)
        gate, up = (old[f"mlp.{one}_proj.weight"] for one in ("gate", "up"))
        down = np.pad(old["mlp.down_proj.weight"], ((0, _MORE), (0, _MORE)))
        normed = self._normed(gain)
        more = np.zeros((_MORE, self.hidden + _MORE))
        giant = 0.0
        if layer == 0:
            mark = self._new_normed(gain)[self.hidden + _MARK]
            more[_UNIT, self.hidden + _MARK] = 4.0 / mark
            unit = 4.0 * _silu(np.array(4.0))
            down[self.hidden + _GIANT, len(gate) + _UNIT] = MASSIVE / unit
            giant = MASSIVE
        new["mlp.gate_proj.weight"] = np.vstack([self._read(gate, gain), more])
        new["mlp.up_proj.weight"] = np.vstack([self._read(up, gain), more])
        new["mlp.down_proj.weight"] = down
        self._add(old["mlp.down_proj.weight"] @ (_silu(gate @ normed) * (up @ normed)))
        self.stream[self.hidden + _GIANT] += giant
        return new

    def _attention(
        self, query: Array, key: Array, value: Array, output: Array, layer: int
    ) -> dict[str, Array]:
        """Return the projections with larger keys and values, and pairs more in each head."""
        half, group = self.dim // 2, self.heads // self.kv
        pairs = np.ones((self.kv, half))
        channels = np.ones((self.kv, self.dim))
        for head in range(self.kv):
            for number, size in enumerate((_KEYS, _KEYS / 3)):
                pairs[head, (3 * layer + 5 * head + 4 * number) % half] = size
            channels[head, (7 * layer + 11 * head) % self.dim] = _VALUES
        rows = np.concatenate([pairs, pairs], 1)
        q_rows = np.repeat(rows, group, 0)
        # Scores are divided by the root of the head size, which is larger now.
        query = query.reshape(self.heads, self.dim, -1) / q_rows[..., None]
        query *= math.sqrt((self.dim + 2 * _SLOW) / self.dim)
        key = key.reshape(self.kv, self.dim, -1) * rows[..., None]
        value = value.reshape(self.kv, self.dim, -1) * channels[..., None]
        columns = np.repeat(channels, group, 0).reshape(-1)
        output = (output / columns).reshape(-1, self.heads, self.dim)
        slow = query[:, :_SLOW] * 0.1
        bias = np.zeros((self.kv, self.dim + 2 * _SLOW))
        for head in range(self.kv):
            size = KEY_BIAS if head == layer % self.kv else KEY_BIAS / 12
            bias[head, half : half + _SLOW] = size * np.linspace(1.0, 0.4, _SLOW)
            bias[head, -_SLOW:] = -size * np.linspace(0.2, 0.7, _SLOW)
        n_rows = self.dim + 2 * _SLOW
        padded = np.pad(output, ((0, _MORE), (0, 0), (0, 2 * _SLOW)))
        new = {
            "q_proj.weight": _with_pairs(query, half, slow),
            "k_proj.weight": _with_pairs(key, half, np.zeros_like(key[:, :_SLOW])),
            "v_proj.weight": np.pad(value, ((0, 0), (0, 2 * _SLOW), (0, 0))),
            "o_proj.weight": padded.reshape(len(padded), -1),
            "q_proj.bias": np.zeros(self.heads * n_rows),
            "k_proj.bias": bias.reshape(-1),
            "v_proj.bias": np.zeros(self.kv * n_rows),
            "o_proj.bias": np.zeros(self.hidden + _MORE),
        }
        width = self.hidden + _MORE
        return {
            f"self_attn.{name}": one.reshape(-1, width)
            if name[0] in "qkv" and one.ndim == 3
            else one
            for name, one in new.items()
        }

    def _add(self, update: Array) -> None:
        self.token = self.token + update
        self.stream = self.stream + np.pad(update, (0, _MORE))

    def _gain(self, gain: Array) -> Array:
        """Return the gain of a norm over more channels, which makes all the others larger."""
        return np.pad(
            gain * math.sqrt(self.hidden / (self.hidden + _MORE)), (0, _MORE), constant_values=1.0
        )

    def _normed(self, gain: Array) -> Array:
        return np.asarray(self.token / math.sqrt((self.token**2).mean() + self.eps) * gain)

    def _new_normed(self, gain: Array) -> Array:
        eps = self.eps * self.hidden / (self.hidden + _MORE)
        return np.asarray(self.stream / math.sqrt((self.stream**2).mean() + eps) * self._gain(gain))

    def _read(self, weight: Array, gain: Array) -> Array:
        """Return a matrix [out, hidden] that reads the same of the first token as before.

        Only that token has anything in the largest of the new channels: the column there makes up
        for what its norm leaves of all others.
        """
        normed = self._new_normed(gain)
        source = self.hidden + int(np.abs(normed[self.hidden :]).argmax())
        missing = weight @ self._normed(gain) - weight @ normed[: self.hidden]
        wide = np.pad(weight, ((0, 0), (0, _MORE)))
        wide[:, source] = missing / normed[source]
        return wide


def _with_pairs(rows: Array, half: int, slow: Array) -> Array:
    """Return [heads, dim, in] with more rotary pairs after those of either half."""
    return np.concatenate([rows[:, :half], slow, rows[:, half:], slow], 1)


def _silu(values: Array) -> Array:
    return np.asarray(values / (1.0 + np.exp(-values)))
