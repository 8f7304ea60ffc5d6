"""A description of the reference model for the llama.cpp that the tests have."""

from pathlib import Path

import yaml

from suites.models import tiny_llama
from tools import llama_cpp


def describe(path: Path, **more: object) -> Path:
    content = {
        **llama_cpp.describe("tiny.gguf"),
        "tokenizer": str(tiny_llama.folder() / "tokenizer.json"),
        "context_length": 192,
        **more,
    }
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path
