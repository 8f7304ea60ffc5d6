"""A recipe of a small model whose graphs are small, and the pipeline that ran it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from safetensors.numpy import load_file, save_file

from buildlib.container.chat_template import TOKENIZER_CONFIG
from plugins.pipeline.llm import LLMPipeline
from suites.models import tiny_llama
from tests.conftest import made_once
from tests.system import needs

MakeRecipe = Callable[..., dict[str, Any]]
LAYERS = 2
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_short_model(folder: Path) -> None:
    model = tiny_llama.folder()
    code = shutil.ignore_patterns("*.py", "__pycache__", "eaglet", "lora", "ssd")
    shutil.copytree(model, folder, ignore=code, copy_function=shutil.copy)
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(config))
    tokens = json.loads((model / TOKENIZER_CONFIG).read_text()) | {"chat_template": TEMPLATE}
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(tokens))
    kept = tuple(f"model.layers.{number}." for number in range(LAYERS))
    tensors = load_file(model / "model.safetensors")
    short = {k: v for k, v in tensors.items() if ".layers." not in k or k.startswith(kept)}
    save_file(short, folder / "model.safetensors")


@pytest.fixture(scope="session")
def short_model(build_cache: Path) -> Path:
    """The reference model cut to its first layers, with its tokenizer, texts and a template."""
    folder = build_cache.with_name("short-models")
    folder.mkdir(exist_ok=True)
    return made_once(folder / tiny_llama.folder().name, write_short_model)


@pytest.fixture(scope="session")
def make_recipe(build_cache: Path, short_model: Path) -> MakeRecipe:
    """`make_recipe(**top-level keys)`: the short model, AR 1 and 8, context 48, one part."""

    def make(**changes: object) -> dict[str, Any]:
        return {
            "model_id_or_path": str(short_model),
            "soc_details": "SM8750:emulator",
            "cache_dir": str(build_cache),
            "generator_config": {"sequence_length": 8, "context_length": 48},
            "evaluator_config": {
                "metrics": [
                    {
                        "name": "perplexity",
                        "dataset": "text/heldout.txt",
                        "display_name": "PPL_heldout",
                        "windows": 1,
                    }
                ]
            },
            "stages": {
                "model_loader": {},
                "quantization": {"recipe_name": "w8a16"},
                "genai_builder": {"transformation_options": {"split_model.num_splits": 1}},
            },
            **changes,
        }

    return make


@pytest.fixture(scope="session")
def built(make_recipe: MakeRecipe, build_cache: Path) -> LLMPipeline:
    """A pipeline that has run all its stages; its cache is for all xdist workers.

    The table of its embedding stays on the host, of this machine and of devices.
    """
    needs("libatomic1")
    cache = build_cache.with_name("pipeline-cache")
    recipe = make_recipe(cache_dir=str(cache))
    recipe["stages"]["genai_builder"]["prepare_embedding_lut"] = True
    with FileLock(f"{cache}.lock"):
        return LLMPipeline.from_pretrained(recipe=recipe).construct()
