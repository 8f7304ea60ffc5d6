"""Models in folders with any name, and paths as people write them."""

import json
import os
import shutil
from pathlib import Path

import pytest

from buildlib.container.container import GenAIContainer
from buildlib.container.manifest import binary_name, file_name_problem, plain_name
from buildlib.errors import InputFileError, ModelFileError, ModelWarning
from buildlib.genai import GenAIBuilderFactory
from suites.models import tiny_llama
from tests.builders import builder_for
from tests.buildlib.model_folders import copy_of_export


@pytest.mark.variant
@pytest.mark.needs("libatomic1")
def test_a_folder_may_have_any_name_and_a_model_an_unknown_family(tmp_path: Path) -> None:
    name = f"Llama 3.2 (мой)\n[b]{'a' * 200}"
    model = copy_of_export("dynamo-llama", tmp_path / name)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "newcomer", "architectures": ["NewcomerForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.warns(ModelWarning, match="no known family"):
        builder = builder_for(model, tmp_path / "cache", [1], [32])
    metadata = GenAIContainer.load(builder.build().path).metadata
    assert metadata.model.name == plain_name(name)
    assert metadata.model.architecture == "newcomer"


@pytest.mark.parametrize("name", ["two words", "модель", "-dash", ".hidden", "a" * 255, "x\n"])
def test_binaries_have_names_that_a_container_can_hold(name: str) -> None:
    binary = binary_name(name, 10, 10)
    assert file_name_problem([binary]) is None
    assert len(binary) < 200
    assert binary.endswith("_part_10_of_10.bin")


def test_a_path_that_no_file_can_tell_of_is_refused(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff"))
    folder.mkdir()
    with pytest.raises(ModelFileError, match="UTF-8") as caught:
        GenAIBuilderFactory.create(folder)
    str(caught.value).encode()


def test_text_that_is_too_large_is_not_passed_over(tmp_path: Path) -> None:
    model = copy_of_export("torchscript-llama", tmp_path / "model")
    with (model / "text" / "calibration.txt").open("ab") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(InputFileError, match=r"calibration\.txt.*67108864"):
        GenAIBuilderFactory.create(model)


def test_the_working_folder_may_change_before_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_of_export("torchscript-llama", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    builder = builder_for(Path("model"), Path("cache"), [1], [32])
    builder.encodings_path = Path("model", "model.encodings")
    monkeypatch.chdir("/")
    build = builder.plan()
    assert build.cache_root == tmp_path / "cache"
    assert all(path.is_file() for path in build.sources.main.inputs().values())


def test_a_checkpoint_of_no_known_family_is_refused_without_a_promise(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    shutil.copytree(tiny_llama.folder(), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text()) | {"model_type": "newcomer", "architectures": ["New"]}
    file.write_text(json.dumps(config))
    builder = GenAIBuilderFactory.create(tmp_path / "model", cache_root=tmp_path / "cache")
    builder.set_targets(["SM8750:emulator"])
    with pytest.raises(ModelFileError, match="no family that can be exported"):
        builder.build()
    assert not [each for each in recwarn if "family" in str(each.message)]
