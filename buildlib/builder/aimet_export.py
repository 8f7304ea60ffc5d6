"""Float ONNX for AIMET: canonical, with every weight a float32 initializer.

aimet-onnx quantizes the weights that it finds as initializers of their operators. Behind a Cast, as
in checkpoints of 16 bits, it finds none, and silently leaves them in float.
"""

import tempfile
from pathlib import Path

import numpy as np
import onnx_ir as ir

from buildlib.builder.model_folder import link_configuration
from buildlib.builder.sources import CheckpointSource, OnnxSource, find_source
from buildlib.builder.stages.author import AuthorModel
from buildlib.builder.stages.import_onnx import ImportOnnx
from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.graph.files import load_model, save_model, tensor_array
from buildlib.graph.shape import GraphShape
from buildlib.graph.values import is_real, static_shape
from buildlib.quantize.tensor_writer import TensorWriter, replace_constant

_WEIGHTS = "float32.safetensors"


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
