"""What a container can have beyond the plain model: adapters, a table on the host, speculation."""

from collections.abc import Callable
from pathlib import Path

import pytest

from buildlib.builder.lora_config import LoraBuilderInputConfig
from buildlib.container.container import GenAIContainer
from buildlib.container.manifest import CLIPPED_ADAPTERS
from buildlib.errors import InvalidOptionError, ModelFileError, ModelWarning
from buildlib.genai import GenAIBuilderHTP
from buildlib.numerics.verifier import VerifyOptions
from tests.builders import builder_for

FEW = VerifyOptions(max_positions=24, continuation=2)


def decoding(folder: Path, text: str, cache: Path) -> GenAIBuilderHTP:
    return builder_for(folder, cache, [1], [96], None, text=text)


def check_floats(builder: GenAIBuilderHTP) -> GenAIContainer:
    """Build it, and compare its float models."""
    report = builder.verify(FEW)
    floats = [c for c in report.rows if c.side in {"arcl", "split", "mha2sha"}]
    assert {comparison.side for comparison in floats} >= {"split", "mha2sha"}
    assert all(comparison.passed for comparison in floats), report.rows
    return builder.build()


@pytest.mark.needs("libatomic1", "plugins.lora")
def test_adapters_are_inputs_of_the_graphs_and_files_of_the_container(
    one_layer: Path,
    tiny_text: str,
    make_adapter: Callable[..., Path],
    build_cache: Path,
    tmp_path: Path,
) -> None:
    builder = decoding(one_layer, tiny_text, build_cache)
    modules = {"self_attn.q_proj": (40, 24), "self_attn.v_proj": (40, 24)}
    make_adapter(tmp_path / "adapters" / "mild", modules, layers=1)
    modules = {"self_attn.q_proj": (40, 24), "mlp.up_proj": (40, 72)}
    make_adapter(tmp_path / "adapters" / "strong", modules, layers=1, rank=1, strength=32.0)
    builder.lora_config = LoraBuilderInputConfig.create(
        lora_config_path=tmp_path / "adapters", quant_updatable_mode="adapter_only"
    )
    with pytest.warns(ModelWarning, match=r"adapter strong leaves .* clipped: build with"):
        container = check_floats(builder)
    assert container.metadata.model.quantization[CLIPPED_ADAPTERS] == "strong"
    assert container.metadata.graphs.splits == 3  # embedding and head apart
    lora = container.genie_config.dialog.target_engine.model.lora
    assert lora is not None
    assert [a.path for a in lora.adapters] == ["lora/mild", "lora/strong"]
    kinds = {name: record.kind for name, record in container.metadata.files.items()}
    assert any(name.startswith("lora/mild/") and kinds[name] == "lora" for name in kinds)


@pytest.mark.needs("plugins.lora")
def test_adapters_that_do_not_fit_are_refused_before_the_first_stage(
    one_layer: Path, tiny_text: str, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    builder = decoding(one_layer, tiny_text, tmp_path / "cache")
    other = make_adapter(tmp_path / "other", {"self_attn.q_proj": (64, 64)}, layers=1)
    builder.lora_config = LoraBuilderInputConfig.create(lora_config_path=other)
    job = builder.plan()
    with pytest.raises(ModelFileError, match="q_proj of layer 0 maps 64 to 64, in the mod"):
        job.run()
    assert job.records == []
    fitting = make_adapter(tmp_path / "fitting", {"self_attn.q_proj": (40, 24)}, layers=1)
    builder.lora_config = LoraBuilderInputConfig.create(lora_config_path=fitting)
    builder.set_options({"quantization.recipe": "w4a16-spinquant"})
    with pytest.raises(InvalidOptionError, match="adapters were trained on hidden states"):
        builder.plan()
    (fitting / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ModelFileError, match="adapter_model"):
        builder.plan()
