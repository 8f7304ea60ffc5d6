"""What `qnnfarm aot push` asks of a context before it goes to a phone."""

import shutil
from pathlib import Path

import pytest

from buildlib.container.container import GenAIContainer
from buildlib.errors import InputFileError
from buildlib.foreign.importer import import_artifact
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from plugins.mllm.command_device import LEAST_TOP1, compare_with_float
from plugins.mllm.context import MllmFiles, plan_context
from tests.buildlib.conftest import MakeCheckpoint
from tests.plugins.mllm.mllm_files import QWEN, write_files


@pytest.mark.variant
@pytest.mark.needs("libatomic1")
def test_a_context_of_other_weights_answers_nonsense(
    adb_environment: Path, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """As of blocks that are read as others."""
    files = write_files(make_checkpoint, tmp_path / "m", cl=96, tie_word_embeddings=False)
    target, toolchain = files.target(emulator=True), OrtQnnToolchain()
    build = plan_context(files, "m", 32, target, tmp_path / "cache", toolchain)
    outputs = build.outputs()
    container = GenAIContainer.load(outputs.container)
    (binary,) = outputs.binaries
    _import_again(binary, files, container, tmp_path)
    own = compare_with_float(container, tmp_path / "m")
    assert own.top1 > 2 * LEAST_TOP1
    # Tied embeddings of random weights repeat the last token, of any weights.
    other = make_checkpoint(
        tmp_path / "other", **QWEN | {"hidden_size": 96, "tie_word_embeddings": False}
    )
    assert compare_with_float(container, other).top1 < LEAST_TOP1


def _import_again(binary: Path, files: MllmFiles, container: GenAIContainer, folder: Path) -> None:
    """Import the binary with what stands beside it; it is the same container."""
    shutil.copy(binary, files.parameters.parent / "m.bin")
    target = files.target(emulator=True)
    imported = import_artifact(files.parameters.parent, folder / "imported", target=target)
    for one in ("contract", "target", "graphs"):
        assert getattr(imported.metadata, one) == getattr(container.metadata, one)
    assert imported.genie_config.dialog.context == container.genie_config.dialog.context
    shutil.copy(binary, files.parameters.parent / "n.bin")
    with pytest.raises(InputFileError, match="one file"):
        import_artifact(files.parameters.parent, folder / "second", target=target)
