"""A model folder of PowerServe: `model.json`, `vocab.gguf`, `ggml/weights.gguf` and `qnn/`.

Source: https://github.com/powerserve-project/PowerServe (Apache-2.0), README, `src/core/config.cpp`
and `src/backend/qnn`. Graphs take embeddings, which the host looks up in the GGUF.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from buildlib.checkpoint.config import read_object
from buildlib.checkpoint.layout import TOKENIZER_FILE
from buildlib.container.genie_engine import PositionalEncoding
from buildlib.embedding.config import TABLE_FILE, EmbeddingConfig
from buildlib.errors import InputFileError
from buildlib.foreign.artifact import ForeignArtifact
from buildlib.gguf import GgufHeader

_WORKSPACE, _MODEL, _CONFIG = "workspace.json", "model.json", "qnn/config.json"
_VOCABULARY, _WEIGHTS = "vocab.gguf", "ggml/weights.gguf"
_TABLE = "token_embd.weight"
_ROWS = 1024
_File = Annotated[str, Field(pattern=r"^\w[\w.+-]{0,199}$")]
_Number = Annotated[int, Field(ge=0, le=1 << 32)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Workspace(_Part):
    model_main: _File


class _Rope(_Part):
    rope_dim: Annotated[int, Field(ge=2, le=1 << 16)]
    rope_freq_base: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Sizes(_Part):
    rope_config: _Rope


class _ModelFile(_Part):
    model_id: Annotated[str, Field(max_length=200)]
    model_arch: Annotated[str, Field(max_length=100)]
    llm_config: _Sizes


class _Graph(_Part):
    model_path: _File
    start_layer_id: _Number = 0
    kv_size: _Number = 0


class _QnnFile(_Part):
    graphs: Annotated[tuple[_Graph, ...], Field(min_length=1, max_length=1024)]
    embeddings: Annotated[tuple[_Graph, ...], Field(max_length=1024)] = ()
    vision: object = None


def is_artifact(path: Path) -> bool:
    """Return whether it is a model folder, or a workspace with one."""
    return (path / _CONFIG).is_file() or (path / _WORKSPACE).is_file()


def read_artifact(path: Path, folder: Path, tokenizer: Path | None) -> ForeignArtifact:
    """Read a model folder; its table of embeddings goes into another folder.

    The keys and values of a system prompt that it may have are left out.
    """
    del tokenizer
    source = path
    if (path / _WORKSPACE).is_file():
        source = path / read_object(path / _WORKSPACE, _Workspace).model_main
    model = read_object(source / _MODEL, _ModelFile)
    graphs = read_object(source / _CONFIG, _QnnFile)
    if not graphs.embeddings:
        reason = f"{_CONFIG} has no embeddings: PowerServe computes its logits on the CPU"
        raise InputFileError(str(source), reason)
    if graphs.vision is not None:
        raise InputFileError(
            str(source), "its prompts are images, too, which no runtime here takes"
        )
    chunks = sorted(graphs.graphs, key=lambda graph: graph.start_layer_id)
    names = dict.fromkeys(graph.model_path for graph in (*chunks, *graphs.embeddings))
    binaries = tuple(source / "qnn" / name for name in names)
    keys = GgufHeader.read(source / _VOCABULARY).keys
    rope, own = model.llm_config.rope_config, source / TOKENIZER_FILE
    eos = _token(keys, "eos_token_id")
    return ForeignArtifact(
        path,
        name=model.model_id or source.resolve().name,
        contract="powerserve",
        binaries=binaries,
        files={one.name: one for one in (*binaries, source / _CONFIG, source / _WEIGHTS)},
        tokenizer=own if own.is_file() else None,
        bos=_token(keys, "bos_token_id") if keys.get("tokenizer.ggml.add_bos_token", True) else -1,
        eos=() if eos is None else (eos,),
        architecture=model.model_arch,
        toolchain={"toolchain": "powerserve"},
        table=_write_table(source / _WEIGHTS, folder / TABLE_FILE),
        positions=PositionalEncoding(rope_dim=rope.rope_dim // 2, rope_theta=rope.rope_freq_base),
    )


def _token(keys: Mapping[str, object], key: str) -> int | None:
    value = keys.get(f"tokenizer.ggml.{key}")
    return value if isinstance(value, int) else None


def _write_table(path: Path, target: Path) -> EmbeddingConfig:
    rows = GgufHeader.read(path).rows(_TABLE)
    if len(rows.shape) != 2:
        raise InputFileError(str(path), f"its {_TABLE} is no matrix")
    with target.open("wb") as sink:
        for begin in range(0, len(rows), _ROWS):
            sink.write(rows[begin : begin + _ROWS].astype(np.float32).tobytes())
    return EmbeddingConfig(embed_length=rows.shape[1], embed_path=target)
