"""Families of models that are tested to build, and how `config.json` identifies them.

A model of no such family may build all the same: what counts is its graph, which importing reads.
A family stands here once an export of it is built and checked by the tests. Baichuan, which the
vendor's documentation names too, is not here: transformers has no such model to check against.
"""

from collections.abc import Mapping
from enum import StrEnum


class SupportedLLMs(StrEnum):
    """A family; the value is its `model_type` in `config.json`.

    `QWEN2` includes Qwen 1.5 and 2.5, which use the same class, `PHI3` the mini models of
    Phi-3, 3.5 and 4.
    """

    LLAMA = "llama"
    MISTRAL = "mistral"
    PHI3 = "phi3"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


_CLASSES = {
    "LlamaForCausalLM": SupportedLLMs.LLAMA,
    "MistralForCausalLM": SupportedLLMs.MISTRAL,
    "Phi3ForCausalLM": SupportedLLMs.PHI3,
    "Qwen2ForCausalLM": SupportedLLMs.QWEN2,
    "Qwen3ForCausalLM": SupportedLLMs.QWEN3,
}


def detect_architecture(config: Mapping[str, object]) -> SupportedLLMs | None:
    """Return the family that `model_type` and `architectures` agree on; either may be missing.

    None when they name no known family, or different ones: relatives such as `qwen2_moe` and
    `llama4` have other graphs and are not taken for what they resemble.
    """
    kind = config.get("model_type")
    by_type = next((family for family in SupportedLLMs if family.value == kind), None)
    names = config.get("architectures")
    if not isinstance(names, list | tuple) or not names:
        return by_type
    by_class = {_CLASSES.get(name) if isinstance(name, str) else None for name in names}
    if len(by_class) != 1:
        return None
    (family,) = by_class
    return family if kind is None or family == by_type else None
