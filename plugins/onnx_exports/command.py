"""`qnnfarm export`: float ONNX for AIMET, canonical, with every weight a float32 initializer.

aimet-onnx quantizes the weights that it finds as initializers of their operators. Behind a Cast, as
in checkpoints of 16 bits, it finds none, and silently leaves them in float.
"""

import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import onnx_ir as ir
import typer

from buildlib.builder.model_folder import link_configuration
from buildlib.builder.sources import CheckpointSource, OnnxSource, find_source
from buildlib.builder.stages.author import AuthorModel
from buildlib.builder.stages.import_onnx import ImportOnnx
from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.graph.files import load_model, save_model, tensor_array
from buildlib.graph.shape import GraphShape
from buildlib.graph.values import is_real, static_shape
from buildlib.paths import user_path
from buildlib.quantize.tensor_writer import TensorWriter, replace_constant
from harness.cli.arguments import Json
from harness.console import answers, print_json

_WEIGHTS = "float32.safetensors"


def export(
    model_dir: Annotated[
        Path, typer.Argument(help="A checkpoint in Hugging Face layout, or an ONNX export.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the ONNX; made if need be.")],
    ar: Annotated[int, typer.Option(min=1, help="Tokens per graph call.")] = 128,
    cl: Annotated[int, typer.Option(min=2, help="Context length in tokens.")] = 4096,
    json: Json = False,
) -> None:
    """Write a model as float ONNX in canonical form, with tokenizer and configuration beside it.

    Every weight is a float32 initializer: aimet-onnx leaves those behind a Cast in float. Quantize
    it with AIMET, and build it with AIMET's encodings: `qnnfarm build OUT --encodings
    model.encodings`.

    Example: qnnfarm export MODEL_DIR --out exported --ar 128 --cl 4096
    """
    path = export_for_aimet(model_dir, user_path(out), GraphShape(ar, cl))
    if json:
        print_json({"model": str(path), "dtype": "float32", "ar": ar, "cl": cl})
        return
    answers().print(
        f"{path}: float32, AR {ar}, CL {cl}; build it with `qnnfarm build {out} --encodings FILE`"
    )


def export_for_aimet(model_dir: Path, folder: Path, shape: GraphShape) -> Path:
    """Write `model.onnx` for aimet-onnx, with weights, configuration and tokenizer beside it.

    The folder with the encodings that AIMET writes of it is an input of the Gen AI Builder: tensors
    keep their names. Memory holds one weight.

    Args:
        model_dir: a checkpoint, or an ONNX export; its own encodings are left out.
        folder: made if need be.
        shape: of the graph.
    """
    source = find_source(model_dir, None, calibrates=False)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".canonical.") as scratch:
        canonical = Path(scratch)
        match source:
            case CheckpointSource():
                AuthorModel(source, {}, shape).run(canonical)
            case OnnxSource():
                ImportOnnx(source, {}, shape).run(canonical)
        model = load_model(canonical / MODEL_FILE)
        write_constants(model, folder)
        link_configuration(canonical, folder)
        return save_model(model, folder / MODEL_FILE)


def write_constants(model: ir.Model, folder: Path) -> None:
    """Write every real constant as float32 to a file in `folder`, and drop casts, in place.

    Those of 32 bits too: onnx loads no file that has several hard links.
    """
    narrow = {name: value for name, value in model.graph.initializers.items() if is_real(value)}
    (folder / _WEIGHTS).unlink(missing_ok=True)
    shapes = {name: static_shape(value) or () for name, value in narrow.items()}
    with TensorWriter(folder / _WEIGHTS, shapes) as file:
        for name, value in narrow.items():
            assert value.const_value is not None  # noqa: S101  (an initializer)
            file.write(name, tensor_array(value.const_value).astype(np.float32))
            replace_constant(model.graph, name, file.tensor(name))
