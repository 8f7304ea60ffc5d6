"""The embedding table on the host, looked up by the real Genie."""

from pathlib import Path

import numpy as np
import pytest

from buildlib.container.genie_config import GenieConfig
from buildlib.container.genie_validator import check_genie_text
from buildlib.embedding.config import TABLE_FILE
from buildlib.embedding.extraction import EmbeddingExtraction
from buildlib.embedding.table import write_table
from tests.buildlib.dialogs.genie_lab import GenieLab

Dialog = tuple[Path, GenieConfig]


@pytest.fixture(scope="module")
def embedded(genie_lab: GenieLab, tmp_path_factory: pytest.TempPathFactory) -> Dialog:
    folder = tmp_path_factory.mktemp("embedded")
    model = folder / "embedded.onnx"
    EmbeddingExtraction().run(genie_lab.export / "model.onnx", model)
    return folder, genie_lab.compile(model, folder)


@pytest.mark.variant
@pytest.mark.genie_configuration("embedding lut ufixed16")
def test_a_table_on_the_inputs_grid_gives_the_same_text(
    genie_lab: GenieLab, plain_answer: str, embedded: Dialog
) -> None:
    folder, config = embedded
    table = write_table(genie_lab.export / "model.onnx", folder / TABLE_FILE, "uint16")
    looked_up = config.with_embedding(table.genie())
    check_genie_text(looked_up.to_json().encode(), "genie_config.json")
    assert TABLE_FILE in looked_up.referenced_files
    assert genie_lab.ask(folder, looked_up) == plain_answer


@pytest.mark.variant
@pytest.mark.genie_configuration("embedding lut ufixed8")
def test_a_coarser_table_is_requantized(genie_lab: GenieLab, embedded: Dialog) -> None:
    folder, config = embedded
    table = write_table(genie_lab.export / "model.onnx", folder / TABLE_FILE, "uint8")
    assert genie_lab.ask(folder, config.with_embedding(table.genie()))


@pytest.mark.variant
@pytest.mark.genie_configuration("embedding lut float32")
def test_genie_rounds_a_float_table_down(
    genie_lab: GenieLab, plain_answer: str, embedded: Dialog
) -> None:
    """So half a step on top of it is what the graph's own grid would hold."""
    folder, config = embedded
    source = genie_lab.export / "model.onnx"
    exact = write_table(source, folder / TABLE_FILE, "uint16")
    assert exact.embed_quant_scale is not None
    floats = write_table(source, folder / "floats.raw", "float32")
    values = np.fromfile(folder / "floats.raw", np.float32) + np.float32(
        exact.embed_quant_scale / 2
    )
    values.tofile(folder / "floats.raw")
    assert genie_lab.ask(folder, config.with_embedding(floats.genie("floats.raw"))) == plain_answer
