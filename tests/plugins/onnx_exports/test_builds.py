"""Exports that others made, from their files to a container, and the same numbers all the way."""

import json
from pathlib import Path

import pytest

from buildlib.errors import ModelWarning
from buildlib.genai import GenAIBuilderHTP
from tests.builders import builder_for
from tests.buildlib.model_folders import EXPORTS, copy_of_export

NAMES = sorted(path.name for path in EXPORTS.iterdir() if path.is_dir())
"""`make exports` builds all; the suite builds one, in `tests/buildlib/builder/test_model_names.py`,
and reads all in `test_exports.py`, which makes them alike."""


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of an export with a tokenizer of a letter a token, and text to calibrate on."""
    return copy_of_export(str(request.param), tmp_path / str(request.param))


def small_builder(folder: Path, cache: Path, *more: int) -> GenAIBuilderHTP:
    return builder_for(folder, cache, [1, *more], [24])


@pytest.mark.slow
@pytest.mark.needs("libatomic1")
@pytest.mark.parametrize("folder", NAMES, indirect=True)
def test_an_export_is_built_and_no_stage_changes_it(folder: Path, tmp_path: Path) -> None:
    report = small_builder(folder, tmp_path / "cache", 8).verify(emulator=True)
    stages = [comparison.side for comparison in report.rows]
    assert (stages[0], stages[-1]) == ("import", "compile")
    assert report.passed, report.rows


@pytest.mark.slow
@pytest.mark.parametrize("folder", NAMES, indirect=True)
def test_weights_that_techniques_change_are_no_fault_of_the_import(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "model.encodings").unlink(missing_ok=True)
    builder = small_builder(folder, tmp_path / "cache").set_options(
        {"quantization.recipe": "w4a16"}
    )
    report = builder.verify(emulator=True)
    assert report.passed, report.rows
    found = {one.side: one for one in report.rows}
    assert found["import"].found.relative < 1e-5 < 1e-2 < found["optimize"].found.relative


@pytest.mark.parametrize("folder", ["dynamo-llama"], indirect=True)
def test_a_context_that_the_model_was_not_made_for_is_warned_of(
    folder: Path, tmp_path: Path
) -> None:
    builder = small_builder(folder, tmp_path / "cache")
    lengths = "arn_cl_options.context_length"
    builder.set_options({lengths: [64, 128]}).plan()  # what it was made for: no word
    with pytest.warns(ModelWarning, match=r"made for 128 positions .* length of 136 may"):
        builder.set_options({lengths: [64, 136]}).plan()
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    stretched = small_builder(folder, tmp_path / "cache")
    stretched.set_options({lengths: [256]}).plan()
    with pytest.warns(ModelWarning, match="256 positions"):
        stretched.set_options({lengths: [264]}).plan()
