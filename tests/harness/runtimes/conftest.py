"""A small container for dialogs, with all that can be asked for."""

from collections.abc import Callable
from pathlib import Path

import pytest

from buildlib.builder.lora_config import LoraBuilderInputConfig
from buildlib.container.container import GenAIContainer
from tests.builders import builder_for
from tests.buildlib.conftest import MakeCheckpoint
from tests.system import needs

_ATTENTION = {"self_attn.q_proj": (40, 72)}
RED = _ATTENTION | {"self_attn.v_proj": (40, 24)}
BLUE = _ATTENTION | {"mlp.down_proj": (72, 40)}


@pytest.fixture(scope="session")
def talker(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer; with tied weights it would repeat what it reads."""
    folder = tmp_path_factory.mktemp("talker")
    return make_checkpoint(folder, num_hidden_layers=1, tie_word_embeddings=False)


@pytest.fixture(scope="session")
def graphs_container(talker: Path, tiny_text: str, build_cache: Path) -> GenAIContainer:
    """Four graphs: AR 1 and 16 at CL 48 and 64."""
    needs("libatomic1")
    return builder_for(talker, build_cache, (1, 16), (48, 64), text=tiny_text).build()


@pytest.fixture(scope="session")
def dialog_container(
    talker: Path,
    tiny_text: str,
    make_adapter: Callable[..., Path],
    build_cache: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> GenAIContainer:
    """A host embedding table and two adapters; AR 1 and 16, CL 64."""
    needs("libatomic1", "plugins.lora")
    folder = tmp_path_factory.mktemp("dialogs")
    adapters = folder / "adapters"
    make_adapter(adapters / "red", RED, layers=1, seed=1, strength=1.0)
    make_adapter(adapters / "blue", BLUE, layers=1, seed=2, strength=1.0)
    builder = builder_for(talker, build_cache, (1, 16), (64,), None, text=tiny_text)
    builder.prepare_embedding_lut = True
    builder.lora_config = LoraBuilderInputConfig(lora_config_path=adapters)
    return builder.build()
