"""`Checkpoint`: configuration and lazily readable tensors of one model folder."""

import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from buildlib.checkpoint.config import CheckpointConfig, load_checkpoint_config
from buildlib.checkpoint.layout import CONFIG_FILE, TOKENIZER_FILE, read_json
from buildlib.checkpoint.tensor_file import TensorRef, find_nonfinite, read_header
from buildlib.checkpoint.tokenizer import check_tokenizer
from buildlib.errors import ModelFileError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20
_HEAD = "lm_head.weight"
_COMPUTED = re.compile(r"\.rotary_emb\.|\.self_attn\.(?:masked_)?bias$")
"""Buffers that some exporters store and every reader computes."""
MAY_BE_ZERO = ("o_proj", "down_proj")
"""Projections whose weights are all 0 in layers that were added and not trained (LLaMA Pro)."""
ZEROS = "holds zeros alone; get the file again"
"""Fault of other matrices."""
_COMPARED_BYTES = 16 << 20


@dataclass(frozen=True)
class Checkpoint:
    """A model in Hugging Face layout whose files have been checked against its configuration.

    Attributes:
        tensors: by Llama's names, such as `model.layers.0.mlp.up_proj.weight`; projections that the
            file has as one are rows of that one. With tied embeddings there may be no
            `lm_head.weight`; `lm_head` is the one to use.
    """

    folder: Path
    config: CheckpointConfig
    tensors: Mapping[str, TensorRef]

    @classmethod
    def load(cls, folder: Path) -> "Checkpoint":
        """Read the configuration and all tensor headers of `folder`, no tensor data.

        Raises:
            ModelFileError: a file is missing, corrupt, or disagrees with the configuration; or the
                model is sound but not one that can be built.
        """
        if not folder.is_dir():
            raise ModelFileError(folder, "no such folder")
        config = load_checkpoint_config(folder / CONFIG_FILE)
        tensors = _read_tensors(folder)
        for name, shape in expected_tensors(config).items():
            ref = tensors.get(name)
            if ref is None:
                raise ModelFileError(folder, f"tensor {name!r} is missing")
            if ref.shape != shape:
                reason = f"tensor {name!r} is {list(ref.shape)}, config.json says {list(shape)}"
                raise ModelFileError(ref.path, reason)
        _refuse_others(config, tensors)
        return cls(folder, config, MappingProxyType(_unfused(config, tensors)))

    def check_content(self) -> None:
        """Check the values of all tensors, which reads all bytes, and the tokenizer.

        A weight may not be NaN or infinite, nor a matrix all 0; a stored output projection that is
        tied must equal the embedding.
        """
        check_tokenizer(self.tokenizer_path, self.config)
        refs = list(self.tensors.values())
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            faults = pool.map(find_nonfinite, refs)
            for (name, ref), (place, zero) in zip(self.tensors.items(), faults, strict=True):
                untrained = any(f".{part}." in name for part in MAY_BE_ZERO)
                if zero and len(ref.shape) == 2 and not untrained:
                    raise ModelFileError(ref.path, f"tensor {ref.name[:80]!r} {ZEROS}")
                if place is not None:
                    value = ref.numpy()[place]
                    reason = f"tensor {ref.name[:80]!r}: {value} at {list(place)}, no number"
                    raise ModelFileError(ref.path, reason)
        stored = self.tensors.get(_HEAD)
        if stored is None or not self.config.tie_word_embeddings:
            return
        if stored.shape != self.lm_head.shape or not _same_bytes(stored, self.lm_head):
            reason = (
                f"tie_word_embeddings is true in config.json, but {_HEAD!r} is stored and differs "
                "from the embedding"
            )
            raise ModelFileError(stored.path, reason)

    @property
    def tokenizer_path(self) -> Path:
        """Path of `tokenizer.json` beside the model, which may be missing."""
        return self.folder / TOKENIZER_FILE

    @property
    def lm_head(self) -> TensorRef:
        """The output projection `[vocab, hidden]`: the embedding itself when tied."""
        tied = self.config.tie_word_embeddings
        return self.tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]


def _refuse_others(config: CheckpointConfig, tensors: Mapping[str, TensorRef]) -> None:
    """Refuse tensors that the configuration has no place for: they would be left out silently."""
    names = expected_tensors(config).keys() | {_HEAD}
    others = [n for n in tensors if n not in names and not _COMPUTED.search(n)]
    if others:
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        reason = (
            f"tensor {others[0][:80]!r}{more} has no place in the model of its config.json, "
            f"a {config.model_type} of {config.num_hidden_layers} layers"
        )
        raise ModelFileError(tensors[others[0]].path, reason)


def _same_bytes(one: TensorRef, other: TensorRef) -> bool:
    rows = max(1, _COMPARED_BYTES * one.shape[0] // max(1, one.n_bytes))
    if one.dtype != other.dtype:
        return False
    a, b = one.numpy().view(np.uint8), other.numpy().view(np.uint8)
    return all(np.array_equal(a[i : i + rows], b[i : i + rows]) for i in range(0, len(a), rows))


def expected_tensors(config: CheckpointConfig) -> dict[str, tuple[int, ...]]:
    """Return every tensor that a file must hold, with the shape that `config` implies."""
    hidden, norms = config.hidden_size, config.family.layer_norms
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        **_norm_tensors(config, "model.norm"),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    parallel = config.use_parallel_residual
    places = [norms.before_attention, norms.after_attention, norms.after_mlp]
    places += [] if parallel else [norms.before_mlp]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for name in filter(None, places):
            shapes |= _norm_tensors(config, prefix + name)
        for stem, parts in _stored_projections(config).items():
            rows = sum(outputs for outputs, _, _ in parts)
            shapes[f"{prefix}{stem}.weight"] = (rows, parts[0][1])
            if parts[0][2]:
                shapes[f"{prefix}{stem}.bias"] = (rows,)
        shapes |= {prefix + name: shape for name, shape in _qk_norm_tensors(config).items()}
    return shapes


def _norm_tensors(config: CheckpointConfig, stem: str) -> dict[str, tuple[int, ...]]:
    kinds = ("weight", "bias") if config.family.norm == "layer" else ("weight",)
    return {f"{stem}.{kind}": (config.hidden_size,) for kind in kinds}


def _qk_norm_tensors(config: CheckpointConfig) -> dict[str, tuple[int, ...]]:
    counts = (config.num_attention_heads, config.num_key_value_heads)
    dim = config.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for stem, heads in zip(config.family.qk_norm_tensors, counts, strict=True):
        match config.qk_norm:
            case "head":
                shapes[f"{stem}.weight"] = (dim,)
            case "all_heads":
                shapes[f"{stem}.weight"] = (heads * dim,)
            case "each_head":
                shapes |= {f"{stem}.norms.{head}.weight": (dim,) for head in range(heads)}
    return shapes


Projection = tuple[int, int, bool]
"""Outputs and inputs of a projection, and whether it has a bias."""


def projections(config: CheckpointConfig) -> dict[str, Projection]:
    """Return projections of a layer by Llama's names."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    return {
        "self_attn.q_proj": (queries, hidden, config.attention_bias),
        "self_attn.k_proj": (keys, hidden, config.attention_bias),
        "self_attn.v_proj": (keys, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, queries, config.attention_out_bias),
        "mlp.gate_proj": (mlp, hidden, config.mlp_bias),
        "mlp.up_proj": (mlp, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, mlp, config.mlp_bias),
    }


def _stored_projections(config: CheckpointConfig) -> dict[str, list[Projection]]:
    """Return a layer's projections in the file, each with those of Llama that it fuses."""
    single, groups = projections(config), config.family.fused
    inside = {name for parts in groups.values() for name in parts}
    wholes = {stem: [single[name] for name in parts] for stem, parts in groups.items()}
    return wholes | {name: [shape] for name, shape in single.items() if name not in inside}


def _unfused(config: CheckpointConfig, stored: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
    """Return the tensors with the rows of each fused projection under Llama's names."""
    tensors, single = dict(stored), projections(config)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for stem, parts in config.family.fused.items():
            for kind in ("weight", "bias"):
                whole = tensors.pop(f"{prefix}{stem}.{kind}", None)
                if whole is None:
                    continue
                start = 0
                for name in parts:
                    stop = start + single[name][0]
                    full = f"{prefix}{name}.{kind}"
                    tensors[full] = whole.rows(start, stop, full)
                    start = stop
    return tensors


def _read_tensors(folder: Path) -> dict[str, TensorRef]:
    index = folder / _INDEX
    if (folder / _SINGLE).exists() or not index.exists():
        return read_header(folder / _SINGLE)
    weight_map = _read_index(index)
    files = {name: read_header(folder / name) for name in sorted(set(weight_map.values()))}
    tensors: dict[str, TensorRef] = {}
    for name, file_name in weight_map.items():
        if name not in files[file_name]:
            raise ModelFileError(folder / file_name, f"tensor {name[:80]!r} is missing")
        tensors[name] = files[file_name][name]
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    data = read_json(path, _MAX_INDEX_BYTES)
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(path, "holds no weight_map")
    for file_name in weight_map.values():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            reason = f"names a file outside its folder: {str(file_name)[:80]!r}"
            raise ModelFileError(path, reason)
    return weight_map
