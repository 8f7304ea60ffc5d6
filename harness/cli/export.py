"""`qnnfarm export`: a model as float ONNX, for tools that quantize it."""

from pathlib import Path
from typing import Annotated

import typer

from buildlib.builder.aimet_export import export_for_aimet
from buildlib.graph.shape import GraphShape
from buildlib.paths import user_path
from harness.cli.arguments import Json
from harness.console import answers, print_json


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
