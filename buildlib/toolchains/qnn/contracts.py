"""Contracts of graphs: the names by which builders of context binaries call tensors.

Standard library only, Python 3.8+: it goes to devices beside their scripts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class Contract(NamedTuple):
    """Names by which a kind of graph takes and gives its tensors; regular expressions.

    Keys of the cache have tokens on their last axis, `[..., head_dim, CL-AR]`, values on the one
    before it.

    Attributes:
        past: group `kind` tells keys from values; or `index` does, of which the first half are
            keys.
        new: replacement that turns the name of a past tensor into that of its new columns; None
            where names do not tell, but encodings and the order of outputs do.
        logits: output; all others are new columns, or inputs of later parts.
        flow: one input and one output that hand values from each part to the next, of the same
            names in all; empty where names tell.
        keys_by_token: whether new columns of keys are rows, `[AR, head_dim]`.
    """

    name: str
    tokens: str
    mask: str
    past: str
    new: str | None
    logits: str
    embeddings: str = "(?!)"
    positions: str = "(?!)"
    rotation: str = "(?!)"
    zero: str = "(?!)"
    flow: tuple[str, ...] = ()
    keys_by_token: bool = False

    def port_name(self, name: str, part: int) -> str:
        """Return a tensor's name in the whole model, by its name in a part, from 0."""
        if name not in self.flow:
            return name
        number = part + self.flow.index(name)
        return f"{self.flow[0]}_{number}" if number else name

    def caches(self, names: Iterable[str]) -> list[tuple[str, bool, str | None]]:
        """Return the inputs that are a cache: name, whether of keys, and name of the new columns.

        The last is None where names do not tell.
        """
        matches = [match for name in names if (match := re.fullmatch(self.past, name))]
        matches.sort(key=lambda match: int(match.groupdict().get("index", 0)))
        caches = []
        for number, match in enumerate(matches):
            kind = match.groupdict().get("kind", "key" if 2 * number < len(matches) else "value")
            new = None if self.new is None else match.expand(self.new)
            caches.append((match[0], kind == "key", new))
        return caches


CONTRACTS = (
    Contract(
        name="genie",
        tokens="input_ids",
        embeddings="inputs_embeds",
        mask="attention_mask",
        rotation=r"(?P<prefix>.*)position_ids_(?P<function>cos|sin)",
        past=r"past_(?P<kind>key|value)_(\d+)_in",
        new=r"past_\g<kind>_\2_out",
        logits="logits",
        zero=r".*lora.*",
    ),
    # github.com/UbiquitousLearning/mllm, its QNN runners
    Contract(
        name="mllm",
        tokens="input_ids",
        positions="position_ids",
        mask="attention_mask",
        past=r"past_(?P<kind>key|value)_(\d+)",
        new=r"present_\g<kind>_\2",
        logits="logits",
    ),
    # github.com/pytorch/executorch, examples/qualcomm/oss_scripts/llama
    Contract(
        name="executorch",
        tokens=r"input_\d+_tokens@0",
        positions=r"input_\d+_input_pos@0",
        mask=r"input_\d+_atten_mask@0",
        past=r"input_\d+_args_(?P<index>\d+)@0",
        new=None,
        logits=r"output_.*@0",
    ),
    # github.com/powerserve-project/PowerServe (Apache-2.0), src/backend/qnn
    Contract(
        name="powerserve",
        tokens="(?!)",
        embeddings="x",
        mask="attn_bias",
        rotation=r"(?P<prefix>)rope_embed_(?P<function>cos|sin)",
        past=r"layer_(\d+)_(?P<kind>key|value)_(?:t_)?cache_(\d+)",
        new=r"layer_\1_\g<kind>_\3",
        logits="logits",
        flow=("x", "out"),
        keys_by_token=True,
    ),
)
"""Those that are known; the first that knows the cache of a graph by name is taken."""


def find_contract(names: Iterable[str]) -> Contract:
    """Return the contract that knows the cache of graphs by the names of their inputs.

    Raises:
        ValueError: none does.
    """
    inputs = tuple(names)
    for contract in CONTRACTS:
        if contract.caches(inputs):
            return contract
    contract_names = ", ".join(contract.name for contract in CONTRACTS)
    raise ValueError(f"no input is a key/value cache by the names of {contract_names}")
