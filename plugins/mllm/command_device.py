"""`qnnfarm aot compile`, `push` and `run`: from a `.mllm` file to a device."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
import yaml

from buildlib.container.container import GenAIContainer
from buildlib.container.manifest import is_container
from buildlib.files import atomic_write_bytes
from buildlib.graph.files import link_into
from buildlib.numerics.evaluation import ModelSide, compare_sides
from buildlib.paths import default_cache_root
from buildlib.sizes import size_text
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from harness.cli.arguments import DeviceOptions, Json, RunOptions, absolute, with_groups
from harness.cli.device_lease import open_session
from harness.cli.generate import answer
from harness.cli.progress import BuildBar
from harness.cli.verify import emulated
from harness.console import answers, print_json, print_remark, print_rows
from harness.deploy.deployment import Deployment
from harness.errors import BAD, WrongUseError
from harness.runtimes.deployed import DeployedRuntime
from harness.runtimes.registry import open_model
from harness.workloads.bench_prompt import bench_text
from harness.workloads.generate import Generate
from harness.workloads.reference import float_config, open_float, window_samples
from harness.workloads.verify import float_side
from plugins.mllm.command_files import read_configs
from plugins.mllm.compiler import check_compilable, compile_context, find_compiler
from plugins.mllm.config import RUNNER_CL, AotConfig, ModelConfig
from plugins.mllm.contents import size_name
from plugins.mllm.context import MllmFiles, plan_context
from plugins.mllm.runtime import MllmDescription, MllmModel, check_binary, described_model

if TYPE_CHECKING:
    from buildlib.numerics.divergence import Divergence
    from harness.runtimes.base import Model

_TOKENIZER = "tokenizer.json"
LEAST_TOP1 = 0.25
"""Of a sound context: real models of 4 bits have 0.5 and more, nonsense nearly nothing."""

_Config = Annotated[Path, typer.Option("-c", "--config", help="The model's config_X.json.")]
_TokenizerFile = Annotated[
    Path | None,
    typer.Option(
        "-t",
        "--tokenizer",
        help="The model's tokenizer.json; by default that beside the file of -m, or of -c.",
        show_default=False,
    ),
]
_MLLMS_AR = 32


@dataclass(frozen=True)
class RunnerOptions:
    """A context and its runner."""

    context: Annotated[
        Path, typer.Option("-m", "--model", help="The context, as `aot compile` writes it.")
    ]
    config: _Config
    tokenizer: _TokenizerFile = None
    ar_len: Annotated[
        int,
        typer.Option(min=1, help="Tokens of a prefill call of the context."),
    ] = _MLLMS_AR
    build: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="mllm's runners for the device: build-android-arm64-v8a-qnn/bin of its checkout.",
            show_default=False,
        ),
    ] = None
    op_packages: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="mllm's op packages: custom-op-package/LLaMAPackage/build of its checkout.",
            show_default=False,
        ),
    ] = None

    def open_model(self, build: Path) -> MllmModel:
        """Open the context for mllm's runners."""
        inside = self.context.with_suffix("") / self.context.name
        tokenizer = find_tokenizer(self.tokenizer, self.context, self.config, inside)
        description = MllmDescription(
            runtime="mllm",
            model=str(self.context.absolute()),
            tokenizer=str(tokenizer.absolute()),
            config=str(self.config.absolute()),
            build=str(build.absolute()),
            ar_len=self.ar_len,
            op_packages=absolute(self.op_packages),
        )
        return described_model(self.context.with_suffix(".yaml").absolute(), description)


def compile_(
    model_path: Annotated[Path, typer.Option("-m", "--model-path", help="The `.mllm` file.")],
    config: _Config,
    aot_config: Annotated[
        Path,
        typer.Option(help="The qnn_aot_cfg_X.json."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output-context-name",
            help="The context to write; by default such as qwen3-1.7B-lpbq-sha.bin.",
            show_default=False,
        ),
    ] = None,
    tokenizer: _TokenizerFile = None,
    toolchain: Annotated[
        Literal["pypi", "qairt", "mllm"],
        typer.Option(
            help="Compiler: `pypi`, of the wheel that is installed with qnnfarm, `mllm`, your "
            "build of mllm's own, or `qairt`, the vendor's SDK."
        ),
    ] = "pypi",
    ar: Annotated[
        int, typer.Option(min=2, help="Tokens of a prefill call; mllm's own compiler makes 32.")
    ] = 32,
    emulator: Annotated[
        bool, typer.Option("--emulator", help="Compile for the emulator of the SoC.")
    ] = False,
    mllm_build: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="With --toolchain mllm: build-qnn-aot.", show_default=False
        ),
    ] = None,
    qnn_env_path: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --toolchain mllm: QNN's libraries for this host.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace files that are there.")] = False,
) -> None:
    """Compile a `.mllm` file into a context of graphs model.0.s1 and model.0.sAR.

    Beside X.bin, the folder X is the same as a container, which `--runtime graph` runs.

    Example: qnnfarm aot compile -m x.mllm -c CONFIG --aot-config AOT_CONFIG
    """
    model, aot = read_configs(config, aot_config)
    family = aot.quant_recipe.builtin_llm_pass.model
    suffix = "-emulator" if emulator else ""
    out = output or Path(f"{family}-{size_name(model)}-lpbq-sha{suffix}.bin")
    if out.suffix != ".bin":
        raise WrongUseError(f"-o {out}: name a file that ends in .bin")
    if out.exists() and not overwrite:
        raise WrongUseError(f"{out} exists already; --overwrite replaces it")
    if toolchain == "mllm":
        if emulator or ar != _MLLMS_AR:
            raise WrongUseError(
                f"--toolchain mllm makes graphs of AR {_MLLMS_AR} and 1 for phones: leave out "
                "--emulator and --ar"
            )
        _compile_with_mllm(model_path, config, aot_config, out, mllm_build, qnn_env_path)
        return
    if qnn_env_path is not None or mllm_build is not None:
        raise WrongUseError("--qnn-env-path and --mllm-build belong to --toolchain mllm")
    files = _files(model_path, (config, model), (aot_config, aot), tokenizer)
    if toolchain == "qairt":
        raise WrongUseError(
            "--toolchain qairt: names of graphs have no dots in the SDK's converter, and mllm's "
            "runners look for model.0.s1; use pypi"
        )
    _compile(files, out, ar, emulator=emulator, replace=overwrite)


def _compile_with_mllm(
    parameters: Path,
    config: Path,
    aot_config: Path,
    out: Path,
    build: Path | None,
    qnn_env_path: Path | None,
) -> None:
    model, aot = read_configs(config, aot_config)
    check_compilable(model, aot)
    compiler = find_compiler(aot.quant_recipe.builtin_llm_pass.model, build)
    compile_context(compiler, parameters, config, aot_config, out, qnn_env_path)
    check_binary(out, _MLLMS_AR)
    answers().print(f"{out}: by {compiler.name}, graphs model.0.s1 and model.0.s{_MLLMS_AR}")


def _compile(files: MllmFiles, out: Path, ar: int, *, emulator: bool, replace: bool) -> None:
    target = files.target(emulator=emulator)
    name = out.stem
    with BuildBar(str(target)) as progress:
        cache, toolchain = default_cache_root(), OrtQnnToolchain()
        build = plan_context(files, name, ar, target, cache, toolchain, on_stage=progress.show)
        container = build.run(progress.show).save(out.with_suffix(""), exist_ok=replace)
    link_into(container.files[f"{name}.bin"], out.parent, out.name)
    answers().print(
        f"{out}: graphs model.0.s1 and model.0.s{ar} at CL {files.config.max_cache_length} for "
        f"{target}; as a container {container.path}"
    )
    if files.config.max_cache_length != RUNNER_CL:
        print_remark(
            f"mllm's runners have CL {RUNNER_CL} compiled in: this runs by --runtime graph alone"
        )
    elif not emulator:
        print_remark(f"mllm's runners need --ar_len {ar}: their default is 128")


def _files(
    parameters: Path,
    config: tuple[Path, ModelConfig],
    aot: tuple[Path, AotConfig],
    tokenizer: Path | None,
) -> MllmFiles:
    file = find_tokenizer(tokenizer, parameters, config[0])
    return MllmFiles(parameters, *config, *aot, file)


def find_tokenizer(choice: Path | None, *beside: Path) -> Path:
    """Return the tokenizer that was chosen, or the first beside some files."""
    places = list(dict.fromkeys([choice] if choice else [p.with_name(_TOKENIZER) for p in beside]))
    tokenizer = next((path for path in places if path.is_file()), None)
    if tokenizer is None:
        raise WrongUseError(f"there is no {' or '.join(map(str, places))}: name it with -t")
    return tokenizer


@with_groups
def push(
    runner: RunnerOptions,
    *,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The float checkpoint, with which the context's answers are compared first.",
            show_default=False,
        ),
    ] = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Push without that comparison.")
    ] = False,
    options: DeviceOptions,
    json: Json = False,
) -> None:
    """Push the context, mllm's runner, its libraries, op packages and QNN to a phone.

    Contents that the phone holds are not pushed again. Before that, a text is decoded on the
    emulator, and compared with the float checkpoint as `qnnfarm verify` does.

    X.yaml beside the context describes all of it for `qnnfarm bench X.yaml --runtime mllm`.

    Example: qnnfarm aot push -m x.bin -c CONFIG --build DIR --unchecked
    """
    if runner.build is None:
        raise WrongUseError("--build names mllm's runners for the device, which are pushed, too")
    model = runner.open_model(runner.build)
    if not unchecked:
        if checkpoint is None:
            raise WrongUseError(
                "--checkpoint names the float model that the answers are compared with; "
                "--unchecked pushes without"
            )
        found = compare_with_float(_container_of(runner.context), checkpoint)
        print_remark(
            f"on the emulator, {found.top1:.0%} of {found.steps} tokens are the likeliest of the "
            f"float model, KL {found.kl:.5f} nats"
        )
        if found.top1 < LEAST_TOP1:
            print_remark("the context answers nonsense, nothing is pushed")
            raise typer.Exit(BAD)
    with open_session(model, options, command="aot push") as session:
        runtime = session.runtime
        assert isinstance(runtime, DeployedRuntime)  # noqa: S101  (that of mllm)
        deployment, origins = runtime.prepare(), runtime.bundle.files
    _write_description(model)
    _show_deployment(deployment, {n: f.origin for n, f in origins.items()}, json=json)


def _write_description(model: MllmModel) -> None:
    fields = model.description.model_dump(mode="json", exclude_defaults=True)
    atomic_write_bytes(model.path, yaml.safe_dump(fields, sort_keys=False).encode())


def _show_deployment(deployment: Deployment, origins: Mapping[str, str], *, json: bool) -> None:
    if json:
        files = [
            {"name": f.name, "size": f.size, "sha256": f.sha256, "pushed": f.pushed}
            for f in deployment.files
        ]
        print_json({"serial": deployment.serial, "files": files})
        return
    rows = [
        [f.name, size_text(f.size), "pushed" if f.pushed else "was there", origins[f.name]]
        for f in deployment.files
    ]
    print_rows(("file", "size", "", "from"), rows)
    answers().print(
        f"{deployment.serial}: {size_text(deployment.pushed_bytes)} pushed, "
        f"{size_text(deployment.reused_bytes)} were there"
    )


def _container_of(context: Path) -> GenAIContainer:
    folder = context.with_suffix("")
    if not is_container(folder):
        raise WrongUseError(
            f"{folder} is no container, which `qnnfarm aot compile` leaves beside {context.name} "
            "and the emulator needs"
        )
    return GenAIContainer.load(folder)


def compare_with_float(container: GenAIContainer, checkpoint: str | Path) -> "Divergence":
    """Decode a text by the graphs on the emulator, beside a float model."""
    model = open_model(container.path, "graph")
    context = ModelSide("context", partial(emulated, container.path), calls=("decode",))
    config = float_config(checkpoint)
    samples = window_samples(model.windows(bench_text(), 1), config.begin, model.info.model)
    in_float = float_side(partial(open_float, checkpoint, model.info, "onnx"))
    *_, row = compare_sides(in_float, [context], samples, config.vocab_size)
    return row.found


@with_groups
def run(
    runner: RunnerOptions,
    *,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="The prompt; by default a line of the standard input.", show_default=False
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Stop after that many tokens; mllm's runners do not.")
    ] = 128,
    options: RunOptions,
    json: Json = False,
) -> None:
    """Answer a prompt: by mllm's runner on a phone, or by its graphs on a virtual device.

    With --build mllm's runner is pushed and run. Without, the graphs are driven in mllm's contract,
    as `qnnfarm generate X --runtime graph` does.

    Example: qnnfarm aot run -m x.bin -c CONFIG --prompt "In the beginning"
    """
    model: Model
    chat = None
    if runner.build is not None:
        model = runner.open_model(runner.build)
    else:
        container = _container_of(runner.context)
        ars = container.metadata.graphs.auto_regression_numbers
        if runner.ar_len not in ars:
            lengths = ", ".join(map(str, ars))
            raise WrongUseError(f"--ar-len {runner.ar_len}: {runner.context} has {lengths}")
        model = open_model(container.path, "graph")
        chat = "tokenizer_config.json" in container.files or None
    text = prompt if prompt is not None else sys.stdin.readline().rstrip("\n")
    if not text:
        raise WrongUseError("give a prompt: --prompt, or a line on the standard input")
    workload = Generate.of(prompt=text, max_tokens=max_tokens, chat=chat)
    answer(workload, model, [text], options, json=json)
