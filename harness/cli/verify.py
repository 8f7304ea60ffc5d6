"""`qnnfarm verify`: whether two models are the same, of any kind."""

from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from buildlib.checkpoint.layout import TOKENIZER_FILE
from buildlib.container.container import GenAIContainer
from buildlib.container.manifest import is_container
from harness.cli.arguments import (
    DEFAULT_RUNTIME,
    Json,
    KeepIn,
    MaxKl,
    ReferenceWith,
    RunOptions,
    read_text,
    with_groups,
)
from harness.cli.device_lease import virtual_device
from harness.cli.recorded_session import open_recorded_session
from harness.errors import WrongUseError
from harness.runtimes.base import DecodesSteps, Model, Scores, require
from harness.runtimes.container_model import container_of
from harness.runtimes.registry import open_model
from harness.workloads.base import UNRECORDED
from harness.workloads.bench_prompt import bench_text
from harness.workloads.reference import float_config, open_float, window_samples
from harness.workloads.session import Session
from harness.workloads.verify import DEFAULT_WINDOWS, DeviceSide, answer, collect, float_side

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from buildlib.numerics.comparison import SideComparison
    from buildlib.numerics.evaluation import ModelSide, OpenSide

_EMULATED_BY = "graph"


@dataclass(frozen=True)
class Against:
    """Reference of a container, and its runtimes."""

    reference: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="What a container is compared with: the checkpoint that it was built from, as "
            "`build` takes it, or a container, which the emulator runs.",
        ),
    ] = None
    reference_with: ReferenceWith = "onnx"
    max_kl: MaxKl = None
    runtime: Annotated[
        list[str] | None,
        typer.Option(
            "-r",
            "--runtime",
            metavar="NAME",
            help="Runtime of a container: genie, or another of docs/runtimes.md. May be repeated.",
        ),
    ] = None
    db: KeepIn = None


@with_groups
def verify(
    model: Annotated[
        Path,
        typer.Argument(
            help="A container, a checkpoint, or an ONNX export with its checkpoint beside it."
        ),
    ],
    *,
    text: Annotated[
        Path | None,
        typer.Option(
            help="A text to compare on; by default a built-in passage for a container, and random "
            "tokens for a checkpoint."
        ),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Pieces of the text.")] = DEFAULT_WINDOWS,
    length: Annotated[
        int, typer.Option(min=4, help="Tokens of a piece, for a checkpoint, which has no context.")
    ] = 96,
    against: Against,
    options: RunOptions,
    json: Json = False,
) -> None:
    """Tell whether two models are the same, by their logits over the same tokens.

    A checkpoint is compared with transformers' reading of it, both in float32; a container with
    `--reference`, one token a call on a device. `qnnfarm pipeline verify` compares the stages of a
    recipe, and `qnnfarm build --verify` those of a build. Code that comes with a model is never
    run.

    Exits 1 if a side is outside of its bound: 1e-4 of the largest logit between two readings in
    float, `--max-kl` for what is quantized.

    Example: qnnfarm verify CONTAINER --reference CHECKPOINT_DIR --text FILE --max-kl 0.01
    """
    content = None if text is None else read_text(text)
    if is_container(model):
        rows = _container(model, content or bench_text(), windows, against, options)
    elif against.reference is not None:
        raise WrongUseError(f"--reference is for containers, which {model} is not")
    else:
        rows = _checkpoint(model, content, windows, length)
    answer(collect(rows), str(model), json=json)


def _checkpoint(
    model: Path, text: str | None, most: int, length: int
) -> "Iterator[SideComparison]":
    from buildlib.builder.sources import find_source
    from buildlib.builder.verification import verify_model
    from buildlib.checkpoint.tokenizer import load_tokenizer

    source, windows = find_source(model, None, calibrates=False), None
    if text is not None:
        tokenizer = load_tokenizer(source.folder / TOKENIZER_FILE)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        windows = [ids[start : start + length] for start in range(0, len(ids), length)[:most]]
    return verify_model(source, windows, length=length)


def _container(
    folder: Path, text: str, most: int, against: Against, options: RunOptions
) -> "Iterator[SideComparison]":
    from buildlib.numerics.evaluation import compare_sides

    sides = []
    names = against.runtime or [DEFAULT_RUNTIME]
    for name in names:
        require((model := open_model(folder, name)).runtime, (Scores, DecodesSteps))
        opened = open_recorded_session(model, options, command="verify", db=against.db)
        sides.append(DeviceSide(name, opened, text, against.max_kl, against.reference_with).side)
    model = open_model(folder, names[0])
    windows = model.windows(text, most)
    reference, begin, vocab_size = _reference(model, against)
    samples = window_samples(windows, begin, model.info.model)
    return compare_sides(reference, sides, samples, vocab_size)


def _reference(model: Model, against: Against) -> "tuple[ModelSide, Sequence[int], int]":
    """Return what a container is compared with, the tokens before a text, and the vocabulary."""
    from buildlib.numerics.evaluation import ModelSide

    reference = against.reference
    if reference is None:
        raise WrongUseError(
            f"name what {model.path} is compared with: --reference CHECKPOINT_DIR, or a container"
        )
    if is_container(Path(reference)):
        if against.db is not None:
            raise WrongUseError("--db keeps distances from float: --reference is a container")
        context = container_of(model).genie_config.dialog.context
        begin = (context.bos_token,) if context.bos_token >= 0 else ()
        name, opened = Path(reference).name, partial(emulated, Path(reference))
        return ModelSide(name, opened), begin, context.n_vocab
    config = float_config(reference)
    in_float = partial(open_float, reference, model.info, against.reference_with)
    return float_side(in_float, against.reference_with), config.begin, config.vocab_size


@contextmanager
def emulated(folder: Path) -> "Iterator[OpenSide]":
    """Run a container on a virtual device of its SoC; a phone's is made again for the emulator."""
    from buildlib.replay import emulator_twin

    container = GenAIContainer.load(folder)
    with ExitStack() as stack:
        if not container.metadata.target.emulator:
            scratch = stack.enter_context(TemporaryDirectory(prefix="qnnfarm-verify-"))
            container = emulator_twin(container, Path(scratch) / "twin")
        device = stack.enter_context(virtual_device(container))
        session = Session(device, open_model(container.path, _EMULATED_BY))
        opened = nullcontext((stack.enter_context(session), UNRECORDED))
        yield stack.enter_context(DeviceSide(_EMULATED_BY, opened).open())
