"""The parts of a container; the binaries are bytes, since nothing here looks into them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from buildlib.container.genie_config import Context, GenieConfig, basic_dialog
from buildlib.container.manifest import GraphsRecord, ModelRecord
from buildlib.container.writer import ContainerContents, htp_config
from buildlib.targets import parse_target

BINARIES = ("tiny_part_1_of_2.bin", "tiny_part_2_of_2.bin")


@pytest.fixture
def genie_config() -> GenieConfig:
    return basic_dialog(
        context=Context(size=192, n_vocab=1280, bos_token=0, eos_token=1),
        head_dim=32,
        rotary_dim=32,
        rope_theta=10000.0,
        rope_scaling=None,
        ctx_bins=BINARIES,
        emulator=True,
    )


@pytest.fixture
def make_draft(tmp_path: Path, genie_config: GenieConfig) -> Callable[[], ContainerContents]:
    def make() -> ContainerContents:
        parts = tmp_path / "parts"
        parts.mkdir(exist_ok=True)
        (parts / "tokenizer.json").write_text('{"model": {}}')
        binaries = {}
        for number, name in enumerate(BINARIES):
            binaries[name] = parts / f"{number}.bin"
            binaries[name].write_bytes(bytes([number]) * (10_000 * (number + 1)))
        target = parse_target("SM8750:emulator")
        return ContainerContents(
            target=target,
            model=ModelRecord(
                name="tiny",
                architecture="LlamaForCausalLM",
                parameters=950_000,
                inputs={"model.safetensors": "b" * 64, "config.json": "a" * 64},
                quantization={"weights": "int8 per channel", "kv_bits": 8},
            ),
            graphs=GraphsRecord(auto_regression_numbers=(1, 32), context_length=192, splits=2),
            genie_config=genie_config,
            htp_config=htp_config(target),
            tokenizer=parts / "tokenizer.json",
            binaries=binaries,
            toolchain={"toolchain": "ort-qnn", "qnn_build": "v2.51.0"},
            options={"split_model.num_splits": 2, "arn_cl_options.auto_regression_number": (1, 32)},
        )

    return make


@pytest.fixture
def draft(make_draft: Callable[[], ContainerContents]) -> ContainerContents:
    return make_draft()
