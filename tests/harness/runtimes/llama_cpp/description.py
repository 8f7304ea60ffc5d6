"""A description of the reference model for the llama.cpp that the tests have."""

from pathlib import Path

import yaml

from suites.models import tiny_llama
from tools import llama_cpp


def describe(path: Path, **more: object) -> Path:
    """Write a description beside `tiny.gguf`."""
    build = llama_cpp.FOLDER
    content = {
        "runtime": "llama.cpp",
        "model": "tiny.gguf",
        "build": {"x86_64": str(build)},
        "tokenizer": str(tiny_llama.folder() / "tokenizer.json"),
        "context_length": 192,
        "threads": 1,
        "files": {f"glibc/{file.name}": str(file) for file in (build / "glibc").glob("*")},
        "environment": {"LD_LIBRARY_PATH": "glibc:."},
        **more,
    }
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path
