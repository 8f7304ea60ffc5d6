"""Weights of a GGUF under the names, and in the order of rows, of Hugging Face checkpoints.

A tensor of a checkpoint is made of rows of one or several tensors of the file: projections may be
fused on either side, and llama.cpp stores queries and keys of some families for rotary positions
that turn neighbours.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from buildlib.checkpoint.checkpoint import expected_tensors, projections
from buildlib.checkpoint.config import CheckpointConfig
from buildlib.checkpoint.tensor_file import SafetensorsWriter, StoredDtype
from buildlib.gguf import GgufRows
from buildlib.progress import tell
from plugins.gguf.config import ROPE_DIVISORS, ROPE_LONG, ROPE_SHORT, Metadata

_CHUNK_WEIGHTS = 1 << 22
_NOT_WEIGHTS = frozenset((ROPE_DIVISORS, ROPE_LONG, ROPE_SHORT))
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_HEAD_NORM = re.compile(r"(.+)\.norms\.(\d+)")
_DTYPES: dict[str, StoredDtype] = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_Q, _K, _V = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
_GATE, _UP = "mlp.gate_proj", "mlp.up_proj"


@dataclass(frozen=True)
class _Piece:
    """Rows of a tensor of the file, in the order of the checkpoint."""

    rows: GgufRows
    order: npt.NDArray[np.int64]

    def chunks(self) -> Iterator[npt.NDArray[Any]]:
        """Yield the rows, a few at a time."""
        step = max(1, _CHUNK_WEIGHTS // max(1, self.rows.shape[-1]))
        for start in range(0, len(self.order), step):
            yield self.rows[self.order[start : start + step]]


class GgufWeights:
    """Tensors of a checkpoint, found in a GGUF and checked; none is read yet.

    Raises:
        ModelFileError: a tensor is missing, of another shape than the keys say, or has no place.
        InputFileError: a tensor is not whole, or of a type that nobody can read.
    """

    def __init__(self, model: Metadata, config: CheckpointConfig) -> None:
        from gguf.constants import MODEL_ARCH_NAMES
        from gguf.tensor_mapping import get_tensor_name_map

        self._model, self._config = model, config
        arch = next(a for a, name in MODEL_ARCH_NAMES.items() if name == model.header.architecture)
        self._names = get_tensor_name_map(arch, config.num_hidden_layers)
        self._used: set[str] = set()
        self._shapes = expected_tensors(config)
        self._pieces = {name: self._find(name, shape) for name, shape in self._shapes.items()}
        others = model.header.tensors.keys() - self._used - _NOT_WEIGHTS
        if others:
            reason = f"tensor {min(others)[:80]!r} has no place in a {model.header.architecture}"
            raise model.refuse(f"{reason} that builds ({len(others)} such)")

    def save(self, path: Path) -> None:
        """Write them as safetensors, a few rows at a time.

        Halves and bfloat16 stay what they are; quantized ones become float32, which is exact.
        """
        dtypes = {name: self._dtype(name) for name in self._pieces}
        stored = {name: (dtypes[name], shape) for name, shape in self._shapes.items()}
        written, total = 0, sum(map(math.prod, self._shapes.values()))
        with SafetensorsWriter(path, stored) as file:
            for name, pieces in self._pieces.items():
                start = 0
                for chunk in (chunk for piece in pieces for chunk in piece.chunks()):
                    values = chunk
                    if shift := self._shift(name):
                        values = chunk.astype(np.float32) - np.float32(shift)
                    # A vector's rows are its entries, and so are those of the norm of one head.
                    file.write(name, values, start)
                    start += len(values)
                    written += values.size
                    tell(f"{written / total:.0%} of its weights")

    def _dtype(self, name: str) -> StoredDtype:
        kinds = {_DTYPES[piece.rows.dtype.name] for piece in self._pieces[name]}
        return "F32" if len(kinds) > 1 or self._shift(name) else kinds.pop()

    def _shift(self, name: str) -> float:
        return self._model.architecture.gain_shift if name.endswith("norm.weight") else 0.0

    def _find(self, name: str, shape: tuple[int, ...]) -> list[_Piece]:
        inside = _IN_LAYER.fullmatch(name)
        if inside is None:
            return [self._whole(name, shape)]
        layer, stem, kind = inside.groups()
        if each := _HEAD_NORM.fullmatch(stem):
            rows = self._open(self._map(f"model.layers.{layer}.{each[1]}.{kind}", name))
            return [self._piece(rows, np.array([int(each[2])]), name, shape)]
        parts = self._config.family.fused.get(stem, (stem,))
        if parts == (stem,) and stem not in {_Q, _K, _V, _GATE, _UP}:
            return [self._whole(name, shape)]
        single = projections(self._config)
        pieces = []
        for part in parts:
            count = single[part][0]
            rows, start = self._projection(layer, part, kind, name)
            order = start + self._order(part, count)
            pieces.append(self._piece(rows, order, name, (count, *shape[1:])))
        return pieces

    def _projection(self, layer: str, part: str, kind: str, name: str) -> tuple[GgufRows, int]:
        """Return the tensor with the rows of a projection, and the first of them."""
        single = projections(self._config)
        queries, keys, gates = single[_Q][0], single[_K][0], single[_GATE][0]
        places = {
            _Q: (("attn_q", 0), ("attn_qkv", 0)),
            _K: (("attn_k", 0), ("attn_qkv", queries)),
            _V: (("attn_v", 0), ("attn_qkv", queries + keys)),
            _GATE: (("ffn_gate", 0), ("ffn_up", 0)),
            _UP: (("ffn_up", 0),),
        }[part]
        if part == _UP and f"blk.{layer}.ffn_gate.{kind}" not in self._model.header.tensors:
            places = (("ffn_up", gates),)
        for stem, start in places:
            full = f"blk.{layer}.{stem}.{kind}"
            if full in self._model.header.tensors:
                return self._open(full), start
        raise self._model.refuse(f"it has no tensor for {name}")

    def _order(self, part: str, count: int) -> npt.NDArray[np.int64]:
        """Return the rows of a projection in the order of the checkpoint.

        llama.cpp's `llama` turns neighbours: row (head, i, half) of the file is (head, half, i).
        """
        order = np.arange(count)
        if not self._model.architecture.permuted or part not in {_Q, _K}:
            return order
        half = self._config.head_dim // 2
        return order.reshape(-1, half, 2).swapaxes(1, 2).ravel()

    def _whole(self, name: str, shape: tuple[int, ...]) -> _Piece:
        rows = self._open(self._map(name, name))
        return self._piece(rows, np.arange(len(rows)), name, shape)

    def _piece(
        self, rows: GgufRows, order: npt.NDArray[np.int64], name: str, shape: tuple[int, ...]
    ) -> _Piece:
        vector = len(shape) == 1
        fits = rows.shape[-1] == shape[-1] if len(rows.shape) > 1 else vector
        count = 1 if vector and len(rows.shape) > 1 else shape[0]
        if not fits or len(rows.shape) > 2 or len(order) != count or order.max() >= len(rows):
            reason = f"is {list(rows.shape)}, and the file's keys say {list(shape)}"
            raise self._model.refuse(f"the tensor for {name} {reason}")
        return _Piece(rows, order)

    def _map(self, name: str, wanted: str) -> str:
        full = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        if full is None or full not in self._model.header.tensors:
            raise self._model.refuse(f"it has no tensor for {wanted}")
        return full

    def _open(self, full: str) -> GgufRows:
        self._used.add(full)
        return self._model.header.rows(full)
