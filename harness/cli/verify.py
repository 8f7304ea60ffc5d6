"""`qnnfarm verify`: a model as we read it, beside transformers, before any build."""

import math
from pathlib import Path
from typing import Annotated

import typer

from buildlib.builder.sources import find_source
from buildlib.builder.verification import ModelVerification, verify_model
from buildlib.checkpoint.layout import TOKENIZER_FILE
from buildlib.checkpoint.tokenizer import load_tokenizer, tokens_around
from buildlib.numerics.divergence import Divergence
from buildlib.numerics.transformers import installed_versions
from harness.cli.arguments import Json, read_text
from harness.cli.dialog_options import parse_tokens
from harness.console import answers, print_json, print_remark, print_rows
from harness.errors import WrongUseError
from harness.exit_codes import BAD
from harness.results.metrics import METRICS

_HEADINGS = ("tokens", "count", "SQNR", "KL", "top-1", "perplexity", "reference", "relative")


def verify(
    model_dir: Annotated[
        Path,
        typer.Argument(
            help="The folder of a checkpoint in Hugging Face layout, or of an ONNX export with its "
            "checkpoint beside it."
        ),
    ],
    text: Annotated[
        Path | None, typer.Option(help="A text to compare on; by default random tokens.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="IDS",
            help="Token ids in place of a text, such as '1 42 79', or a file of them.",
        ),
    ] = None,
    prefill: Annotated[int, typer.Option(min=1, help="Tokens that go in calls of many.")] = 144,
    decode: Annotated[
        int,
        typer.Option(min=1, help="Tokens after them, one a call: transformers' own greedy choice."),
    ] = 16,
    json: Json = False,
) -> None:
    """Compare the model that a build starts from with transformers' own, both in float32.

    Needs torch and transformers: `pip install 'qnnfarm[reference]'`. Code that comes with a model
    is never run.

    Example: qnnfarm verify MODEL_DIR --text FILE
    """
    if text is not None and tokens is not None:
        raise WrongUseError("--text and --tokens: give one of them")
    ids = None if tokens is None else list(parse_tokens(tokens))
    source = find_source(model_dir, None, calibrates=False)
    if text is not None:
        ids = _encode(read_text(text), source.folder)
    verification = verify_model(source, ids, prefill=prefill, decode=decode)
    if json:
        print_json({"model": str(model_dir), **_document(verification, installed_versions())})
    else:
        parts = {"prefill": verification.prefill, "decode": verification.decode}
        rows = [_cells(name, one) for name, one in parts.items()]
        print_rows(_HEADINGS, rows, right=set(_HEADINGS[1:]))
        versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items())
        verdict = "the same model" if verification.passed else "NOT the same model"
        answers().print(f"{model_dir}: {verdict} as that of transformers ({verification.bound})")
        print_remark(f"by {versions}")
    if not verification.passed:
        raise typer.Exit(BAD)


def _encode(text: str, folder: Path) -> list[int]:
    tokenizer = load_tokenizer(folder / TOKENIZER_FILE)
    before, _ = tokens_around(tokenizer)
    return [*before, *tokenizer.encode(text, add_special_tokens=False).ids]


def _document(verification: ModelVerification, versions: dict[str, str]) -> dict[str, object]:
    return {
        "passed": verification.passed,
        "bound": str(verification.bound),
        "versions": versions,
        "prefill": _values(verification.prefill),
        "decode": _values(verification.decode),
    }


def _values(one: Divergence) -> dict[str, object]:
    sqnr = one.sqnr_db if math.isfinite(one.sqnr_db) else None
    return {"tokens": one.steps, "sqnr_db": sqnr, "relative": one.relative, **one.metrics}


def _cells(name: str, one: Divergence) -> list[str]:
    kl, top1 = METRICS["kl_divergence"].show(one.kl), METRICS["top1_agreement"].show(one.top1)
    perplexities = (f"{one.perplexity:.3f}", f"{one.perplexity_float:.3f}")
    sqnr = f"{one.sqnr_db:.1f} dB"
    return [name, str(one.steps), sqnr, kl, top1, *perplexities, f"{one.relative:.1g}"]
