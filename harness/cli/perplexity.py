"""`qnnfarm perplexity`: how well a container predicts a text, by Genie's accuracy API."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.arguments import WAIT_S, ContainerDir, DeviceName, Json, Wait, read_text
from harness.cli.console import answers, print_json


def perplexity(
    container_dir: ContainerDir,
    text: Annotated[Path, typer.Option(help="The text to score.")],
    device: DeviceName = None,
    windows: Annotated[
        int | None,
        typer.Option(
            min=1, help="Score only the first windows of the context length; by default all."
        ),
    ] = None,
    db: Annotated[
        str | None, typer.Option(help="Results database to keep the result in, for the report.")
    ] = None,
    wait: Wait = WAIT_S,
    json: Json = False,
) -> None:
    """Score a text on a device: the first CL - AR positions of windows of the context length."""
    from harness.cli.session import open_session
    from harness.plans.perplexity import run_perplexity
    from harness.store.store import ResultsStore

    content = read_text(text)
    with open_session(container_dir, device, wait_s=wait) as session:
        if db is None:
            result = session.runtime.score(session.runtime.windows(content, windows))
        else:
            with ResultsStore.open(db) as store:
                result = run_perplexity(
                    session.runtime, content, session.records(), store, max_windows=windows
                )
    if json:
        print_json(
            {
                **session.where,
                "perplexity": result.perplexity,
                "positions": result.positions,
                "tokens": result.tokens,
                "windows": list(result.windows),
                "retries": result.retries,
            }
        )
        return
    answers().print(
        f"perplexity {result.perplexity:.3f} over {result.tokens} tokens in "
        f"{len(result.windows)} windows, on {session.where_in_words}",
        markup=False,
    )
