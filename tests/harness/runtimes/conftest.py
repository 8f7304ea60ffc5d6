"""A small container for dialogs, with all that can be asked for."""
# ruff: noqa: F401, F811 - fixtures of another package

from collections.abc import Callable
from pathlib import Path

import pytest

from buildlib.container.container import GenAIContainer
from buildlib.genai import GenAIBuilderFactory
from buildlib.lora.config import LoraBuilderInputConfig
from tests.buildlib.conftest import (
    make_adapter,
    make_checkpoint,
    tiny,
    tiny_text,
)
from tests.system import needs

_ATTENTION = {"self_attn.q_proj": (40, 72)}
RED = _ATTENTION | {"self_attn.v_proj": (40, 24)}
BLUE = _ATTENTION | {"mlp.down_proj": (72, 40)}


@pytest.fixture(scope="session")
def graphs_container(tiny: Path, tiny_text: str, build_cache: Path) -> GenAIContainer:
    """Random weights in six graphs: AR 1, 8 and 16 at CL 48 and 64."""
    needs("libatomic1")
    builder = GenAIBuilderFactory.create(tiny, cache_root=build_cache, calibration_text=tiny_text)
    builder.set_targets(["SM8750:emulator"]).set_transformation_options(
        {
            "arn_cl_options.auto_regression_number": (1, 8, 16),
            "arn_cl_options.context_length": (48, 64),
            "split_model.num_splits": 1,
        }
    )
    return builder.build()


@pytest.fixture(scope="session")
def dialog_container(
    tiny: Path,
    tiny_text: str,
    make_adapter: Callable[..., Path],
    build_cache: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> GenAIContainer:
    """Random weights, with a host embedding table and two adapters; AR 1 and 16, CL 64."""
    needs("libatomic1")
    folder = tmp_path_factory.mktemp("dialogs")
    adapters = folder / "adapters"
    make_adapter(adapters / "red", RED, seed=1, strength=1.0)
    make_adapter(adapters / "blue", BLUE, seed=2, strength=1.0)
    builder = GenAIBuilderFactory.create(tiny, cache_root=build_cache, calibration_text=tiny_text)
    builder.set_targets(["SM8750:emulator"]).set_transformation_options(
        {
            "arn_cl_options.auto_regression_number": (1, 16),
            "arn_cl_options.context_length": (64,),
        }
    )
    builder.prepare_embedding_lut = True
    builder.lora_config = LoraBuilderInputConfig(lora_config_path=adapters)
    return builder.build()
