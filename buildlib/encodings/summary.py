"""A model's quantization in words, for people who read a container's manifest."""

from collections import Counter
from collections.abc import Iterable

from buildlib.encodings.model import Encoding, Encodings
from buildlib.graph import interface

_KINDS = {
    "PER_TENSOR": "per tensor",
    "PER_CHANNEL": "per channel",
    "PER_BLOCK": "per block",
    "LPBQ": "LPBQ",
    "VECTOR": "vector",
}


def in_words(encodings: Encodings) -> dict[str, str]:
    """What activations, weights and caches are stored as: `{"weights": "int8 per channel: 15"}`.

    Numbers are those of tensors, the most frequent kind first.
    """
    caches = [e for e in encodings.activation_encodings if interface.is_kv(e.name)]
    others = [e for e in encodings.activation_encodings if not interface.is_kv(e.name)]
    groups = {
        "activations": others,
        "kv_cache": caches,
        "weights": encodings.param_encodings,
    }
    return {name: _counted(group) for name, group in groups.items() if group}


def _counted(encodings: Iterable[Encoding]) -> str:
    kinds = Counter(_kind(encoding) for encoding in encodings)
    return ", ".join(f"{kind}: {count}" for kind, count in kinds.most_common())


def _kind(encoding: Encoding) -> str:
    number = "float" if encoding.dtype == "FLOAT" else "int"
    symmetric = " symmetric" if encoding.is_sym else ""
    return f"{number}{encoding.bw}{symmetric} {_KINDS[encoding.enc_type]}"
