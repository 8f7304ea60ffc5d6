"""A recipe of the reference model whose graphs are small, and the pipeline that ran it."""
# ruff: noqa: F401 - fixtures of another package

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from harness.pipeline.llm import LLMPipeline
from suites.models import tiny_llama
from tests.buildlib.conftest import make_checkpoint, tiny_text

MakeRecipe = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def make_recipe(build_cache: Path) -> MakeRecipe:
    """`make_recipe(**top-level keys)`: AR 1 and 8, context 48, one part."""

    def make(**changes: object) -> dict[str, Any]:
        return {
            "model_id_or_path": str(tiny_llama.folder()),
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
    """A pipeline that has run all its stages; its cache is for all xdist workers."""
    cache = build_cache.with_name("pipeline-cache")
    with FileLock(f"{cache}.lock"):
        return LLMPipeline.from_pretrained(recipe=make_recipe(cache_dir=str(cache))).construct()
