"""`config.json` names the family, and a resemblance is not enough."""

import json
from pathlib import Path
from typing import Any

import pytest

from buildlib.checkpoint.architectures import SupportedLLMs, detect_architecture

EXPORTS = sorted((Path(__file__).parents[2] / "fixtures" / "exports").glob("*/config.json"))


@pytest.mark.parametrize("path", EXPORTS, ids=lambda path: path.parent.name)
def test_configs_that_transformers_wrote_are_known(path: Path) -> None:
    family = detect_architecture(json.loads(path.read_text()))
    assert family is not None
    assert family.value in path.parent.name


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"model_type": "llama"}, SupportedLLMs.LLAMA),
        ({"architectures": ["Qwen3ForCausalLM"]}, SupportedLLMs.QWEN3),
        ({"model_type": "phi3", "architectures": []}, SupportedLLMs.PHI3),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, SupportedLLMs.QWEN2),
        ({"model_type": "qwen2", "architectures": ["LlamaForCausalLM"]}, None),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, None),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM", "Other"]}, None),
        ({"model_type": "qwen2_moe"}, None),
        ({"model_type": "llama4"}, None),
        ({"model_type": "LLAMA"}, None),
        ({"model_type": "unheard of", "architectures": ["LlamaForCausalLM"]}, None),
        ({}, None),
    ],
)
def test_type_and_classes_have_to_agree(
    config: dict[str, Any], family: SupportedLLMs | None
) -> None:
    assert detect_architecture(config) is family
