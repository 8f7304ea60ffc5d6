"""Every key of mllm's two configurations changes what is compiled, is refused, or has no effect."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from buildlib.errors import BuildError
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from buildlib.validation import without_effect
from plugins.mllm.canonical import restore_encodings, write_checkpoint
from plugins.mllm.config import AotConfig, ModelConfig, check_pair
from plugins.mllm.contents import check_contents
from plugins.mllm.context import MllmFiles
from plugins.mllm.parameter_file import ParameterFile, read_parameters
from tests.buildlib.conftest import MakeCheckpoint
from tests.plugins.mllm.mllm_files import write_files

OTHERS: Mapping[str, object] = {
    "linear_impl_type": "QNN_LPBQ_w4a16o16_G32",
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "htp_arch": "V75",
    "htp_chipset": "SM8550",
    "htp_try_best_performance": "HtpPowerSaver",
    "htp_security_pd_session": "HtpSignedPd",
    "graph_on_qnn": ["model.layers"],
    "op_on_qnn": [],
    "model": "llama",
    "model_type": "llama",
    "method": "per-channel",
    "precision": "w8a16",
}
"""Other values than the example's, of keys that are no numbers or flags."""


def leaves(data: Mapping[str, Any], way: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*way, key))
        else:
            yield (*way, key)


def changed(data: dict[str, Any], way: tuple[str, ...]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(data))
    place = copy
    for step in way[:-1]:
        place = place[step]
    value = place.get(way[-1])
    if way[-1] in OTHERS:
        place[way[-1]] = OTHERS[way[-1]]
    elif isinstance(value, bool):
        place[way[-1]] = not value
    else:
        assert isinstance(value, int | float), way
        place[way[-1]] = value * 2 if value else 1
    return copy


@pytest.fixture(scope="module")
def files(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> MllmFiles:
    return write_files(make_checkpoint, tmp_path_factory.mktemp("every") / "m", cl=100)


def outcome(
    files: MllmFiles, file: ParameterFile, model: object, aot: object, folder: Path
) -> tuple[object, ...] | str:
    """Return what would be compiled, and how; or why it is refused."""
    try:
        models = ModelConfig.model_validate(model), AotConfig.model_validate(aot)
        check_pair(*models, files.aot_file)
        check_contents(file.path, file.tensors, *models)
        given = MllmFiles(
            files.parameters, files.config_file, models[0], files.aot_file, models[1],
            files.tokenizer,
        )  # fmt: skip
        config = given.compile_config(given.target())
        OrtQnnToolchain().check(config)
        folder.mkdir()
        write_checkpoint(file.tensors, *models, folder)
    except (BuildError, ValidationError) as error:
        return str(error)
    content = (folder / "config.json").read_text("utf-8")
    grids = repr(restore_encodings(file.tensors, *models))
    return config.model_dump_json(), content, grids, models[0].max_cache_length


@pytest.mark.parametrize("kind", [ModelConfig, AotConfig])
def test_a_key_of_mllms_acts_is_refused_or_is_said_to_have_no_effect(
    files: MllmFiles, kind: type[BaseModel], tmp_path: Path
) -> None:
    file = read_parameters(files.parameters)
    model = files.config.model_dump(mode="json") | {"model_type": "qwen3"}
    aot = files.aot.model_dump(mode="json", exclude_none=True)
    data = model if kind is ModelConfig else aot
    plain = outcome(files, file, model, aot, tmp_path / "plain")
    assert not isinstance(plain, str)
    known = set(kind.model_fields)
    silent = set()
    for number, way in enumerate(one for one in leaves(data) if one[0] in known):
        other = changed(data, way)
        pair = (other, aot) if kind is ModelConfig else (model, other)
        if outcome(files, file, *pair, tmp_path / str(number)) == plain:
            silent.add(".".join(way))
    assert silent == {key for key, _ in without_effect(kind)}
