"""What a container can have beyond the plain model: adapters, a table on the host, speculation."""

from collections.abc import Callable
from pathlib import Path

import pytest

from buildlib.container.container import GenAIContainer
from buildlib.errors import InvalidOptionError
from buildlib.genai import GenAIBuilderFactory, GenAIBuilderHTP
from buildlib.lora.config import LoraBuilderInputConfig


def builder_for(folder: Path, text: str, cache: Path) -> GenAIBuilderHTP:
    builder = GenAIBuilderFactory.create(folder, cache_root=cache, calibration_text=text)
    return builder.set_targets(["SM8750:emulator"]).set_transformation_options(
        {
            "arn_cl_options.auto_regression_number": [1],
            "arn_cl_options.context_length": [96],
        }
    )


@pytest.mark.needs("libatomic1")
def test_adapters_are_inputs_of_the_graphs_and_files_of_the_container(
    tiny: Path, tiny_text: str, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    builder = builder_for(tiny, tiny_text, tmp_path / "cache")
    modules = {"self_attn.q_proj": (40, 72), "self_attn.v_proj": (40, 24)}
    adapter = make_adapter(tmp_path / "adapters" / "one", modules)
    builder.lora_config = LoraBuilderInputConfig.create(lora_config_path=adapter)
    report = builder.verify()
    floats = [c for c in report.comparisons if c.stage in {"arcl", "split", "mha2sha"}]
    assert floats
    assert all(comparison.passed for comparison in floats), report.to_json()
    container = GenAIContainer.load(builder.build().path)
    assert container.metadata.graphs.splits == 3  # embedding and head apart
    lora = container.genie_config.dialog.target_engine.model.lora
    assert lora is not None
    assert [a.path for a in lora.adapters] == ["lora/one"]
    kinds = {name: record.kind for name, record in container.metadata.files.items()}
    assert any(name.startswith("lora/one/") and kinds[name] == "lora" for name in kinds)


@pytest.mark.needs("libatomic1")
def test_the_embedding_can_stay_on_the_host(tiny: Path, tiny_text: str, tmp_path: Path) -> None:
    builder = builder_for(tiny, tiny_text, tmp_path / "cache")
    builder.prepare_embedding_lut = True
    report = builder.verify()
    floats = [c for c in report.comparisons if c.stage in {"arcl", "split", "mha2sha"}]
    assert floats
    assert all(comparison.passed for comparison in floats), report.to_json()
    container = builder.build()
    assert container.metadata.files["embedding_weights.raw"].kind == "embedding"
    embedding = container.genie_config.dialog.embedding
    assert embedding is not None
    assert (embedding.size, embedding.datatype) == (40, "ufixed16")


def test_unsupported_features_are_refused_by_name(
    tiny: Path, tiny_text: str, tmp_path: Path
) -> None:
    builder = builder_for(tiny, tiny_text, tmp_path)
    with pytest.raises(InvalidOptionError, match=r"native_kv.*QAIRT SDK"):
        builder.native_kv = True
    with pytest.raises(InvalidOptionError, match=r"adapt_moe.*QAIRT SDK"):
        builder.set_transformation_options({"adapt_moe": True})
    builder.set_compilation_options({"graphs.fp16_relaxed_precision": 0})
    with pytest.raises(InvalidOptionError, match=r"fp16_relaxed_precision.*QAIRT SDK"):
        builder.plan()
