"""What `qnnfarm aot push` asks of a context before it goes to a phone."""

from pathlib import Path

import pytest

from buildlib.container.container import GenAIContainer
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from plugins.mllm.command_device import Agreement, compare_with_float
from plugins.mllm.context import plan_context
from tests.buildlib.conftest import MakeCheckpoint
from tests.plugins.mllm.mllm_files import QWEN, write_files


def test_most_tokens_must_be_likely() -> None:
    assert Agreement(20, 320, 160, 0).holds
    nonsense = Agreement(20, 320, 159, 0)
    assert not nonsense.holds
    assert "nothing is pushed" in str(nonsense)


@pytest.mark.variant
@pytest.mark.needs("libatomic1")
def test_a_context_of_other_weights_answers_nonsense(
    adb_environment: Path, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """As of blocks that are read as others."""
    files = write_files(make_checkpoint, tmp_path / "m", cl=96, tie_word_embeddings=False)
    target, toolchain = files.target(emulator=True), OrtQnnToolchain()
    build = plan_context(files, "m", 32, target, tmp_path / "cache", toolchain)
    container = GenAIContainer.load(build.outputs().container)
    own = compare_with_float(container, tmp_path / "m")
    assert own.holds
    # Tied embeddings of random weights repeat the last token, of any weights.
    other = make_checkpoint(
        tmp_path / "other", **QWEN | {"hidden_size": 96, "tie_word_embeddings": False}
    )
    assert not compare_with_float(container, other).holds
