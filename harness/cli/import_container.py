"""`qnnfarm import-container`: a container of another runtime's files."""

from pathlib import Path
from typing import Annotated

import typer

from buildlib.foreign.importer import import_artifact
from buildlib.targets import parse_target
from harness.cli.arguments import Json
from harness.console import answers, print_json


def import_container(
    source: Annotated[
        Path,
        typer.Argument(
            help="ExecuTorch's `.pte` for its QNN backend, mllm's folder of a context binary, "
            "`config_X.json` and tokenizer, or PowerServe's folder of a model."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the container.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="A `tokenizer.json`, where the artifact has none.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="By default the phone that it was compiled for; `SM8650:emulator` is the virtual "
            "device, for binaries that share no weights."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model; by default that of the file.")
    ] = None,
    bos: Annotated[
        int | None, typer.Option(min=-1, help="Token before a text; -1 for none.")
    ] = None,
    eos: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Token that ends an answer. Can be repeated."),
    ] = None,
    unshared: Annotated[
        bool,
        typer.Option(
            "--no-weight-sharing",
            help="Graphs of a binary share no weights, so that `rehearse` can run them.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Make a container of the graphs of another runtime, for the runtime `graph`.

    Sizes and encodings are those of the graphs; values that the files lack are named, with options.

    Example: qnnfarm import-container model.pte --out CONTAINER_DIR
    """
    soc_target = None if target is None else parse_target(target)
    container = import_artifact(
        source,
        out,
        target=soc_target,
        tokenizer=tokenizer,
        name=name,
        bos=bos,
        eos=tuple(eos or ()),
        weight_sharing=False if unshared else None,
    )
    metadata, context = container.metadata, container.genie_config.dialog.context
    if json:
        print_json({"container": str(container.path), "metadata": metadata.model_dump(mode="json")})
        return
    ars = ", ".join(map(str, metadata.graphs.auto_regression_numbers))
    answers().print(
        f"{container.path}: {metadata.model.name} for {metadata.target.name}, contract "
        f"{metadata.contract}, AR {ars}, CL {context.size}, {context.n_vocab} tokens, bos "
        f"{context.bos_token}, eos {context.eos_token}"
    )
