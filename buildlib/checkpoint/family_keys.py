"""The keys of `config.json` that a family reads, by the release of transformers that reads them.

`make family-defaults` writes them to `family_keys.json`. The `transformers_version` of a
`config.json` decides between the releases. A file without it is read both ways: where the two
differ it is refused, as it may mean either model.
"""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import PydanticCustomError

from buildlib.checkpoint.rotary import unsupported
from buildlib.error_base import one_line

Keys = Mapping[str, Any]

_MAJORS = (5, 4)
# fmt: off
_BOOKKEEPING = frozenset((
    "_attn_implementation", "_name_or_path", "architectures", "attention_dropout",
    "attn_implementation", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype",
    "embd_pdrop", "eos_token_id", "hidden_dropout", "id2label", "initializer_range", "label2id",
    "max_position_embeddings", "model_type", "num_labels", "output_attentions",
    "output_hidden_states", "pad_token_id", "pretraining_tp", "residual_dropout", "resid_pdrop",
    "return_dict", "torch_dtype", "transformers_version", "unsloth_fixed", "unsloth_version",
    "use_cache",
))
# fmt: on
"""Keys that say nothing of what a model computes when it is not trained."""


@dataclass(frozen=True)
class FamilyKeys:
    """Keys that one release of transformers reads for a family.

    Attributes:
        class_name: of the model.
        defaults: of every key that is read.
        nullable: keys that may be null; null in any other is refused.
        ignored: keys of the configuration class that change nothing, and their defaults.
    """

    class_name: str
    defaults: Keys
    nullable: frozenset[str]
    ignored: Keys

    def read(self, file: Keys, major: int) -> dict[str, Any]:
        """Return the value of every key: from the file, or else the default."""
        for key in self.defaults:
            if key in file and file[key] is None and key not in self.nullable:
                reason = f"{key} is null, which {self.class_name} of transformers {major} refuses"
                raise unsupported(reason, by_transformers=True)
        values = {key: file.get(key, default) for key, default in self.defaults.items()}
        for key, default in self.defaults.items():
            if values[key] is None and isinstance(default, bool):
                values[key] = False
        vocabulary = values["vocab_size"]
        for key in ("bos_token_id", "eos_token_id"):
            if key not in file and not _lies_in(vocabulary, values[key]):
                values[key] = None  # the default is of the published models' vocabulary
        return values

    def unread(self, file: Keys) -> list[str]:
        """Return keys of the file that are not read, where they say more than the default."""
        names = self.defaults.keys() | _BOOKKEEPING
        return sorted(
            key
            for key, value in file.items()
            if key not in names and value is not None and value != self.ignored.get(key)
        )


def _lies_in(vocabulary: object, ids: object) -> bool:
    several = ids if isinstance(ids, list) else [ids]
    return isinstance(vocabulary, int) and all(
        isinstance(i, int) and i < vocabulary for i in several
    )


_BAICHUAN = FamilyKeys(
    "BaichuanForCausalLM",
    {
        "vocab_size": 125696,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    frozenset(),
    {"initializer_range": 0.02, "use_cache": True, "z_loss_weight": 0},
)
"""Of `configuration_baichuan.py` beside the published weights: transformers has no such class."""


def releases_of(model_type: str) -> tuple[int, ...]:
    """Return the releases of transformers that have a family, the newest first."""
    return tuple(n for n in _MAJORS if model_type == "baichuan" or model_type in read_tables()[n])


def family_keys(model_type: str, major: int) -> FamilyKeys:
    """Return the keys that transformers `major` reads for a family.

    Raises:
        PydanticCustomError: it has no such family.
    """
    if model_type == "baichuan":
        return _BAICHUAN
    if major not in releases_of(model_type):
        raise unsupported(f"transformers {major} has no {model_type}", by_transformers=True)
    table = read_tables()[major][model_type]
    return FamilyKeys(table["class"], table["keys"], frozenset(table["nullable"]), table["ignored"])


@functools.cache
def read_tables() -> Mapping[int, Mapping[str, Mapping[str, Any]]]:
    """Return the families of each release, with the fields of `FamilyKeys`."""
    releases = json.loads(Path(__file__).with_suffix(".json").read_bytes())
    return {int(version.partition(".")[0]): table for version, table in releases.items()}


def stated_major(file: Keys) -> int | None:
    """Return the release of transformers that wrote a file, 4 or 5; None if it does not say."""
    stated = file.get("transformers_version")
    first = stated.partition(".")[0] if isinstance(stated, str) else ""
    return min(max(int(first), 4), 5) if first.isdecimal() and len(first) < 4 else None


def agreed_reading(file: Keys, read: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `read` for the release of transformers that a file is of.

    A file that names none must mean the same in all releases that do not refuse it themselves.
    """
    stated = stated_major(file)
    if stated is not None:
        return read(stated)
    readings: dict[int, dict[str, Any]] = {}
    refusals: list[PydanticCustomError] = []
    for major in _MAJORS:
        try:
            readings[major] = read(major)
        except PydanticCustomError as error:
            if not (error.context or {}).get("by_transformers"):
                raise
            refusals.append(error)
    if not readings:
        raise refusals[0]
    newest, *others = readings.values()
    for other in others:
        difference = tell_difference(other, newest)
        if difference is not None:
            reason = f"{difference}, and there is no transformers_version to tell which is meant"
            raise unsupported(reason)
    return newest


def tell_difference(older: Keys, newer: Keys) -> str | None:
    """Say which key transformers 4 and 5 read differently; None if none."""
    for key, value in newer.items():
        if older[key] != value and repr(older[key]) != repr(value):  # nan is not itself
            four, five = (one_line(repr(each), 60) for each in (older[key], value))
            return f"{key} is {four} in transformers 4 and {five} in transformers 5"
    return None
