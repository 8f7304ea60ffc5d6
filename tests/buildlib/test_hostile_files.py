"""Files of a model folder that are none, or hold what no model has: one line, before any work."""

import math
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, numpy_helper
from safetensors.numpy import load_file, save_file

from buildlib.builder.sources import CheckpointSource, find_source
from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.layout import CALIBRATION_TEXT
from buildlib.encodings.attachment import attach
from buildlib.encodings.model import Encoding, Encodings
from buildlib.errors import BuildError, EncodingsError, ModelFileError
from buildlib.graph.files import load_model
from buildlib.graph.validation import check_model
from suites.models import tiny_llama
from tests.buildlib.model_folders import copy_of_export

Make = Callable[[Path], object]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        shutil.copy(tiny_llama.folder() / name, folder)
    (folder / CALIBRATION_TEXT).parent.mkdir()
    (folder / CALIBRATION_TEXT).write_text("And the earth was without form. " * 50)
    return folder


def read(path: Path) -> None:
    """Read all that a build reads before its first stage, and what that checks."""
    source = find_source(path, None)
    assert isinstance(source, CheckpointSource)
    Checkpoint.load(path).check_content()


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def listen(path: Path) -> None:
    here = os.open(".", os.O_RDONLY)
    os.chdir(path.parent)  # paths of sockets are short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.fchdir(here)
        os.close(here)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "it is a named pipe, not a file"),
        (Path.mkdir, "it is a folder, not a file"),
        (loop, "Too many levels of symbolic links"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a file"),
        (listen, "it is a socket, not a file"),
    ],
)
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "text/calibration.txt"]
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_is_no_file_is_refused(model: Path, name: str, make: Make, reason: str) -> None:
    (model / name).unlink()
    make(model / name)
    with pytest.raises(BuildError, match=reason) as caught:
        read(model)
    assert Path(name).name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_whose_links_lead_nowhere_is_none(tmp_path: Path) -> None:
    loop(tmp_path / "model")
    with pytest.raises(BuildError, match="there is no such file or folder"):
        find_source(tmp_path / "model", None)


def no_weights(path: Path) -> None:
    save_file({name: values * 0 for name, values in load_file(path).items()}, path)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        (
            "model.safetensors",
            lambda path: path.write_bytes(path.read_bytes() + b"more"),
            "4 bytes from [0-9]+ on belong to no tensor",
        ),
        ("model.safetensors", no_weights, "tensor '[a-z_.0-9]+' holds zeros alone"),
        (CALIBRATION_TEXT, lambda path: path.write_bytes(b"\xff" * 9), "txt': no text in UTF-8"),
        (CALIBRATION_TEXT, lambda path: path.write_bytes(bytes(9)), "no text: it holds NUL"),
    ],
)
def test_what_no_model_holds_is_refused(
    model: Path, name: str | Path, change: Make, reason: str
) -> None:
    change(model / name)
    with pytest.raises(BuildError, match=reason):
        read(model)


@pytest.mark.parametrize("name", ["torchscript-llama", "dynamo-qwen2", "aihub-llama"])
def test_matrices_of_zeros_in_an_export_are_refused(name: str, tmp_path: Path) -> None:
    path = copy_of_export(name, tmp_path / "model") / "model.onnx"
    check_model(load_model(path), path)
    export = onnx.load(path)
    weights = [
        tensor
        for tensor in export.graph.initializer
        if tensor.data_type == TensorProto.FLOAT and math.prod(tensor.dims) >= 1024
    ]
    for tensor in weights:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 0, tensor.name))
    onnx.save(export, path)
    with pytest.raises(ModelFileError, match="holds zeros alone; get the file again"):
        check_model(load_model(path), path)


@pytest.mark.parametrize(("axis", "count"), [(None, 7), (0, 7), (1, 64), (5, 64)])
def test_scales_are_as_many_as_channels(axis: int | None, count: int, tmp_path: Path) -> None:
    model = load_model(copy_of_export("torchscript-qwen2", tmp_path / "model") / "model.onnx")
    name = next(
        str(value.name)
        for value in model.graph.initializers.values()
        if value.const_value is not None and list(value.const_value.shape) == [64, 32]
    )
    grid = Encoding(
        name=name, dtype="INT", enc_type="PER_CHANNEL", bw=8, is_sym=True, axis=axis,
        scale=(0.1,) * count, offset=(-128,) * count,
    )  # fmt: skip
    with pytest.raises(EncodingsError, match=r"scales|no axis 5"):
        attach(model, Encodings(param_encodings=(grid,)))
