"""`qnnfarm aot init`, `quantize` and `convert`: from a checkpoint to a `.mllm` file."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn

from buildlib.builder.sources import find_source
from buildlib.checkpoint.config import load_checkpoint_config
from buildlib.checkpoint.layout import CONFIG_FILE
from buildlib.files import atomic_write_bytes
from buildlib.paths import user_path
from buildlib.sizes import size_text
from buildlib.targets import find_soc
from buildlib.toolchains.base import TensorInfo
from harness.cli.arguments import Json, read_text
from harness.cli.tensors import print_facts, print_shapes
from harness.console import answers, print_json, print_remark, progress
from harness.errors import WrongUseError
from plugins.mllm.config import (
    AotConfig,
    ModelConfig,
    check_pair,
    fixed_by_mllm,
    make_configs,
    read_aot_config,
    read_model_config,
    write_config,
)
from plugins.mllm.contents import size_name
from plugins.mllm.parameter_file import read_parameters, write_parameters
from plugins.mllm.quantization import quantize_checkpoint
from plugins.mllm.tensors import read_safetensors

_CONFIG, _AOT_CONFIG = "config_", "qnn_aot_cfg_"
_TARGET = "SM8650"  # of mllm's own example
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_Config = Annotated[
    Path | None,
    typer.Option(
        "-c", "--config", help="Configuration of the model, `config_X.json`.", show_default=False
    ),
]
_AotConfig = Annotated[
    Path | None,
    typer.Option(
        help="Configuration of the compilation, `qnn_aot_cfg_X.json`.",
        show_default=False,
    ),
]

_MaxLength = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Context length (CL) in tokens; by default that of a configuration, or 1024 if the "
        "model has as many.",
        show_default=False,
    ),
]


def init(
    model_dir: Annotated[
        Path, typer.Argument(help="A checkpoint of Qwen 3, Qwen 2 or Llama in Hugging Face layout.")
    ],
    output_dir: Annotated[Path, typer.Option(help="Folder of the two files.")] = Path(),
    target: Annotated[str, typer.Option(help="SoC to compile for.")] = _TARGET,
    max_length: _MaxLength = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Inputs that share a scale: 16, 32 or 64. By default as mllm has it compiled in.",
            show_default=False,
        ),
    ] = None,
    head_bits: Annotated[
        int,
        typer.Option(help="Bits of the output projection: 4, 8 or 16."),
    ] = 4,
    security: Annotated[
        Literal["HtpSignedPd", "HtpUnsignedPd"],
        typer.Option(
            help="Protection domain on the tensor processor. HtpSignedPd needs a QNN that knows "
            "its option: others end with `Unsupported config option 2`."
        ),
    ] = "HtpUnsignedPd",
    name: Annotated[
        str | None,
        typer.Option(help="X in the names of the files; by default the parameters, such as 1.7B."),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace files that are there.")] = False,
) -> None:
    """Write config_X.json and qnn_aot_cfg_X.json for a checkpoint.

    Context length and block size stand in them once, and all other commands read them there.

    Example: qnnfarm aot init MODEL_DIR --output-dir aot --target SM8650
    """
    config = load_checkpoint_config(model_dir / CONFIG_FILE)
    model, aot = make_configs(
        config,
        find_soc(target),
        cl=max_length,
        block_size=block_size,
        head_bits=head_bits,
        pd_session=security,
    )
    _write_configs(user_path(output_dir), model, aot, name, overwrite=overwrite)
    for remark in fixed_by_mllm(model, aot):
        print_remark(remark)
    if security == "HtpSignedPd":
        print_remark(
            "HtpSignedPd: a QNN that does not know QNN_HTP_DEVICE_CONFIG_OPTION_SIGNEDPD ends "
            "with `Unsupported config option 2`; HtpUnsignedPd asks for nothing"
        )


def quantize(
    model_path: Annotated[
        Path,
        typer.Option(
            help="A checkpoint of Qwen 3, Qwen 2 or Llama in Hugging Face layout.",
        ),
    ],
    output_dir: Annotated[
        Path,
        typer.Option(
            help="Folder of model.safetensors. It gets the tokenizer and both configurations too.",
        ),
    ],
    max_length: _MaxLength = None,
    num_samples: Annotated[
        int,
        typer.Option(min=1, help="Windows of text, each as long as CL."),
    ] = 128,
    config: _Config = None,
    aot_config: _AotConfig = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Text to calibrate on; by default text/calibration.txt of the checkpoint, "
            "else the text that comes with qnnfarm.",
            show_default=False,
        ),
    ] = None,
    technique: Annotated[
        Literal["none", "seqmse", "gptq", "gptaq"],
        typer.Option(help="Technique that chooses the integers of weights; none rounds them."),
    ] = "gptaq",
) -> None:
    """Quantize a checkpoint to W4A16 in blocks (LPBQ) with a cache of uint8, in mllm's names.

    Without --config and --aot-config those in the output folder count; without any there, it gets
    those that `qnnfarm aot init` writes.

    Example: qnnfarm aot quantize --model-path MODEL_DIR --output-dir aot
    """
    text = _calibration_text(model_path, calibration)
    folder = user_path(output_dir)
    pair = choose_configs(folder, config, aot_config)
    if pair is None:
        checkpoint = load_checkpoint_config(model_path / CONFIG_FILE)
        model, aot = make_configs(checkpoint, find_soc(_TARGET), cl=max_length)
    else:
        model, aot = read_configs(*pair)
    if max_length not in {None, model.max_cache_length}:
        raise WrongUseError(
            f"--max-length is {max_length}, and the configuration has max_cache_length "
            f"{model.max_cache_length}; the file decides, for all commands"
        )
    out = folder / "model.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    with _steps() as tell:
        quantize_checkpoint(
            model_path,
            model,
            aot,
            text,
            out,
            n_samples=num_samples,
            technique=technique,
            progress=tell,
        )
    if pair is None:
        _write_configs(folder, model, aot, None, overwrite=False)
    for file in (*(pair or ()), *(model_path / each for each in _TOKENIZER)):
        if file.is_file():
            atomic_write_bytes(folder / file.name, file.read_bytes())
    answers().print(
        f"{out}: W4A16, blocks of {model.linear_block_size}, CL {model.max_cache_length}; "
        f"next `qnnfarm aot convert --input-path {out} --output-path FILE.mllm`"
    )


def convert(
    input_path: Annotated[
        Path,
        typer.Option(
            help="A safetensors file, or a `.mllm` file of version 1 or 2.",
        ),
    ],
    output_path: Annotated[Path, typer.Option(help="The `.mllm` file to write.")],
    model_name: Annotated[
        str,
        typer.Option(
            help="Name of the model for the header, which mllm's own converter leaves empty.",
            show_default=False,
        ),
    ] = "",
    pipeline: Annotated[
        str | None,
        typer.Option(
            help="Option of mllm's converter; refused, with the reason.", show_default=False
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Show every tensor.")] = False,
) -> None:
    """Write a `.mllm` file of version 2, byte for byte as mllm's own class writes it.

    Tensors stand in the order of their names; mllm's converter has them in any order.

    Example: qnnfarm aot convert --input-path FILE --output-path x.mllm
    """
    if pipeline is not None:
        raise WrongUseError(
            f"--pipeline {pipeline}: mllm's pipelines quantize float weights for its CPU kernels, "
            "and files of this flow are quantized already; leave it out"
        )
    if input_path.suffix == ".mllm":
        tensors = read_parameters(input_path).tensors
    else:
        tensors = read_safetensors(input_path)
    if verbose:
        for tensor in tensors.values():
            answers().print(f"{tensor.name} {tensor.dtype} {list(tensor.shape)}")
    write_parameters(user_path(output_path), list(tensors.values()), model_name)
    total = sum(tensor.n_bytes for tensor in tensors.values())
    answers().print(f"{output_path}: {len(tensors)} tensors, {total:,} bytes")


def _write_configs(
    folder: Path, model: ModelConfig, aot: AotConfig, name: str | None, *, overwrite: bool
) -> None:
    label = size_name(model) if name is None else name
    if Path(f"x{label}").name != f"x{label}":
        raise WrongUseError(f"--name {label}: it is a part of the names of two files, no path")
    files = folder / f"{_CONFIG}{label}.json", folder / f"{_AOT_CONFIG}{label}.json"
    for path in files:
        if path.exists() and not overwrite:
            raise WrongUseError(f"{path} exists already; --overwrite replaces it")
    write_config(files[0], model)
    write_config(files[1], aot)
    for path in files:
        answers().print(str(path))


def choose_configs(
    folder: Path, config: Path | None, aot_config: Path | None
) -> tuple[Path, Path] | None:
    """Return the two configurations that are named, or those of a folder; None without any."""
    if config is not None and aot_config is not None:
        return config, aot_config
    if config is not None or aot_config is not None:
        raise WrongUseError("--config and --aot-config belong together; give both or none")
    aots = sorted(folder.glob(f"{_AOT_CONFIG}*.json"))
    models = sorted(folder.glob(f"{_CONFIG}*.json"))
    if not aots and not models:
        return None
    if len(aots) == len(models) == 1:
        return models[0], aots[0]
    names = ", ".join(path.name for path in (*models, *aots))
    raise WrongUseError(f"{folder} has {names}; name a pair with --config and --aot-config")


def inspect(
    path: Annotated[Path, typer.Argument(help="A `.mllm` file of version 1 or 2.")],
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Show every tensor, not one line for equal ones.")
    ] = False,
    json: Json = False,
) -> None:
    """Show version, size and tensors of a `.mllm` file.

    Example: qnnfarm aot inspect x.mllm
    """
    file = read_parameters(path)
    infos = [TensorInfo(t.name, t.shape, t.dtype, None) for t in file.tensors.values()]
    if json:
        found = [{"name": t.name, "shape": t.shape, "dtype": t.dtype} for t in infos]
        about = {"version": file.version, "model_name": file.model_name, "tensors": found}
        print_json({"mllm": about})
        return
    facts = {
        "format": f"mllm's parameters, version {file.version}",
        "model": file.model_name,
        "size": size_text(file.n_bytes),
        "tensors": len(infos),
    }
    print_facts(answers(), facts)
    print_shapes(infos, every=tensors)


def read_configs(model_file: Path, aot_file: Path) -> tuple[ModelConfig, AotConfig]:
    """Read both configurations and check them against each other."""
    model, aot = read_model_config(model_file), read_aot_config(aot_file)
    check_pair(model, aot, aot_file)
    return model, aot


def _calibration_text(model_path: Path, choice: Path | None) -> str:
    if choice is not None:
        return read_text(choice)
    return find_source(model_path, None).calibration_text or ""


@contextmanager
def _steps() -> Iterator[Callable[[str, int, int], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f}"),
        TimeElapsedColumn(),
    )
    with progress(*columns) as bar:
        tasks: dict[str, TaskID] = {}

        def tell(what: str, count: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=count, total=total)

        yield tell
