"""`qnnfarm generate`: a prompt, or a conversation, through a container on a device."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.arguments import (
    DEFAULT_RUNTIME,
    ContainerDir,
    Json,
    RunOptions,
    Runtime,
    absolute,
    with_groups,
)
from harness.cli.dialog_options import DialogOptions, System, UseChat, parse_tokens, tell_faults
from harness.cli.recorded_session import in_words, open_recorded_session, print_from
from harness.console import print_json, print_remark, print_text
from harness.errors import WrongUseError
from harness.results.metrics import METRICS
from harness.runtimes.base import GenerationResult, Model
from harness.runtimes.registry import open_model
from harness.workloads.generate import Generate
from harness.workloads.session import Session

_STDIN = "-"


@with_groups
def generate(
    container_dir: ContainerDir,
    *,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="The prompt. Repeated, each is a turn that sees those before it."),
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="File that holds the prompt; - for the standard input."),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="IDS|FILE", help="Token ids as the prompt; the answer is printed in ids, too."
        ),
    ] = None,
    embeddings: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Embeddings as the prompt, that of bos first: .npy with floats, or raw rows as "
            "the container's table has them.",
        ),
    ] = None,
    runtime: Runtime = DEFAULT_RUNTIME,
    max_tokens: Annotated[int, typer.Option(min=1, help="Stop after that many tokens.")] = 32,
    dialog: DialogOptions,
    chat: UseChat = False,
    system: System = None,
    rewind: Annotated[
        bool,
        typer.Option(
            "--rewind",
            help="Let each turn replace what follows its common beginning with the last.",
        ),
    ] = False,
    save: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the dialog in this new folder.")
    ] = None,
    restore: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with a dialog that --save kept.")
    ] = None,
    options: RunOptions,
    json: Json = False,
) -> None:
    """Generate text on a device and print its speed; greedily, unless sampling is asked for.

    Example: qnnfarm generate CONTAINER_DIR --prompt "In the beginning"
    """
    texts = list(prompt or ())
    if prompt_file == _STDIN:
        texts, prompt_file = [*texts, _read_stdin()], None
    for text in texts:
        _check_text(text)
    if not texts and prompt_file is None and tokens is None and embeddings is None:
        raise WrongUseError("give a prompt: --prompt, --prompt-file, --tokens or --embeddings")
    workload = Generate.of(
        prompt=texts[0] if len(texts) == 1 else tuple(texts) or None,
        prompt_file=absolute(prompt_file),
        tokens=None if tokens is None else parse_tokens(tokens),
        embeddings=absolute(embeddings),
        max_tokens=max_tokens,
        chat=chat or None,
        system=system,
        rewind=rewind or None,
        save=absolute(save),
        restore=absolute(restore),
        **dialog.fields(),
    )
    model = open_model(container_dir, runtime)
    answer(workload, model, texts, options, json=json)


def answer(
    workload: Generate, model: Model, texts: Sequence[str], options: RunOptions, *, json: bool
) -> None:
    """Run a workload with the options of the command, and show the answer.

    Args:
        texts: the prompts, as they were given.
    """
    workload.check(model)
    with open_recorded_session(model, options, command="generate") as (session, recording):
        result = workload.run(session, recording).output
    if json:
        print_json({**session.device_fields, **_document(texts, result)})
    else:
        _show(result, session)


def _read_stdin() -> str:
    text = sys.stdin.read()
    if not text:
        raise WrongUseError("--prompt-file -: the standard input is empty")
    return text


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise WrongUseError("the prompt is not UTF-8: give it in that encoding") from error


def _document(prompts: Sequence[str], result: GenerationResult) -> dict[str, object]:
    document: dict[str, object] = {
        "prompt": prompts[0] if len(prompts) == 1 else list(prompts) or None,
        "text": result.text,
        "metrics": dict(result.metrics),
    }
    if result.token_ids is not None:
        document["tokens"] = list(result.token_ids)
    if result.streams:
        document["streams"] = list(result.streams)
    if len(result.answers) > 1:
        document["answers"] = list(result.answers)
    if result.early_end is not None:
        document["early_end"] = str(result.early_end)
    if result.chat_difference is not None:
        document["chat_difference"] = result.chat_difference
    if result.speculation is not None:
        document["speculation"] = result.speculation.model_dump(mode="json")
    if result.clocked:
        document["by_token_callback"] = sorted(result.clocked)
    return document


def _show(result: GenerationResult, session: Session) -> None:
    for text in result.streams or result.answers or (result.text,):
        print_text(text)
    if result.token_ids is not None:
        print_text(" ".join(map(str, result.token_ids)))
    print_from(session, in_words(result.metrics))
    tell_faults(result)
    if result.chat_difference is not None:
        print_remark(result.chat_difference)
    if result.clocked:
        labels = ", ".join(METRICS[key].label.lower() for key in METRICS if key in result.clocked)
        print_remark(f"Genie's profile lacks {labels}: by the clock of the token callback")
