"""`qnnfarm embed`: texts through a text encoder on a device."""

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from harness.cli.arguments import (
    ContainerDir,
    Json,
    KeepIn,
    RunOptions,
    find_reference,
    with_groups,
    write_file,
)
from harness.cli.recorded_session import open_recorded_session, print_from
from harness.console import answers, print_json, print_remark
from harness.errors import WrongUseError, one_line
from harness.runtimes.registry import open_model
from harness.words import pluralize
from harness.workloads.session import Session
from plugins.encoders.text_encoder import TextVectors
from plugins.encoders.workload import Embed, Embeddings, read_lines, split_lines

_SHOWN_TEXT, _SHOWN_VALUES = 40, 4
_STDIN = "-"


@with_groups
def embed(
    container_dir: ContainerDir,
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT",
            help="Texts to embed. Without any, and without `--file`, one a line from stdin.",
            show_default=False,
        ),
    ] = None,
    *,
    file: Annotated[
        Path | None, typer.Option(help="A file with one text a line; `-` is stdin.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the vectors: `*.npy` as a NumPy array [texts, embed], anything else as raw "
            "little-endian float32, text by text. In a long run it is written now and then, and "
            "keeps the texts before an error or Ctrl-C.",
        ),
    ] = None,
    per_token: Annotated[
        bool,
        typer.Option("--per-token", help="A vector for each token, instead of one for the text."),
    ] = False,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="What the container was built from, as `build` takes it: this host runs it in "
            "float, and the cosine of each text is shown.",
        ),
    ] = None,
    min_cosine: Annotated[
        float | None,
        typer.Option(min=-1, max=1, help="Fail if a text's cosine with `--reference` is below."),
    ] = None,
    db: KeepIn = None,
    options: RunOptions,
    json: Json = False,
) -> None:
    """Embed texts on a device with the container of a text encoder.

    Exits 1 where a cosine is below `--min-cosine`.

    Example: qnnfarm embed CONTAINER_DIR "a first text" "a second one"
    """
    workload = Embed.of(
        texts=_texts(texts, file),
        reference=reference,
        min_cosine=min_cosine,
        per_token=per_token,
    )
    _check_output(output, len(workload.texts or ()), per_token=per_token)
    model = open_model(container_dir)
    workload.check(model)
    find_reference(reference)
    shown = _Progress(workload.texts or (), output, prints=not json and reference is None)
    with open_recorded_session(model, options, command="embed", db=db) as (session, recording):
        embeddings = workload.run(session, recording, shown.update).output
        longest = session.container.embedding_config.context_length
    for text, tokens in zip(embeddings.texts, embeddings.tokens, strict=True):
        if tokens > longest:
            print_remark(f"only the first {longest} of {tokens} tokens of {text[:40]!r} count")
    shown.update(embeddings.result.vectors)
    if json:
        print_json(_document(embeddings, session))
    else:
        _show(embeddings, session, begin=shown.printed)


def _texts(texts: list[str] | None, file: Path | None) -> tuple[str, ...]:
    if texts and file is not None:
        raise WrongUseError("give either texts or --file, not both")
    if texts and texts != [_STDIN]:
        return tuple(texts)
    if file is not None and str(file) != _STDIN:
        return read_lines(file)
    try:
        return split_lines(sys.stdin.buffer.read().decode(), "stdin")
    except UnicodeDecodeError as error:
        raise WrongUseError("stdin is not UTF-8: give it in that encoding") from error


def _check_output(path: Path | None, count: int, *, per_token: bool) -> None:
    """Refuse a file that cannot be written, before a device is touched."""
    if path is None:
        return
    if per_token and path.suffix == ".npy" and count > 1:
        raise WrongUseError(
            "texts have different numbers of tokens, so --per-token writes *.npy of one text only"
        )
    folder = path.expanduser().absolute().parent
    if path.is_dir() or not folder.is_dir():
        raise WrongUseError(f"{path} cannot be written: name a file in a folder that exists")


class _Progress:
    """Shows and writes the texts that are embedded, while others still are."""

    def __init__(self, texts: Sequence[str], output: Path | None, *, prints: bool) -> None:
        self._texts = texts
        self._output = output
        self._prints = prints
        self.printed = 0
        self._written = 0

    def update(self, vectors: Sequence[TextVectors]) -> None:
        """Take the vectors of all texts so far."""
        if self._output is not None and len(vectors) > self._written:
            _write(vectors, self._output)
            self._written = len(vectors)
        if self._prints:
            for text, each in zip(
                self._texts[self.printed :], vectors[self.printed :], strict=False
            ):
                _show_vectors(text, each)
            self.printed = len(vectors)


def _write(vectors: Sequence[TextVectors], path: Path) -> None:
    arrays = [each.array() for each in vectors]
    content = b"".join(array.astype("<f4").tobytes() for array in arrays)
    if path.suffix == ".npy":
        buffer = io.BytesIO()
        np.save(buffer, np.concatenate(arrays), allow_pickle=False)
        content = buffer.getvalue()
    write_file(path, content)


def _document(embeddings: Embeddings, session: Session) -> dict[str, object]:
    """Answer with a vector for each text, or with a list of vectors where there are several."""
    rows = []
    for number, (text, vectors) in enumerate(
        zip(embeddings.texts, embeddings.result.vectors, strict=True)
    ):
        values = vectors.array().tolist()
        row: dict[str, object] = {
            "text": text,
            "tokens": embeddings.tokens[number],
            "seconds": vectors.seconds,
            "shape": list(vectors.shape),
            "embedding": values[0] if len(values) == 1 else values,
        }
        if embeddings.cosines:
            row["cosine_float"] = embeddings.cosines[number]
        rows.append(row)
    return {**session.device_fields, "metrics": dict(embeddings.result.metrics), "embeddings": rows}


def _show(embeddings: Embeddings, session: Session, begin: int) -> None:
    vectors, cosines = embeddings.result.vectors, embeddings.cosines
    for number, (text, each) in enumerate(zip(embeddings.texts, vectors, strict=True)):
        if number >= begin:
            _show_vectors(
                text, each, f", cosine with float {cosines[number]:.4f}" if cosines else ""
            )
    mean = 1000 * sum(each.seconds for each in vectors) / len(vectors)
    least = f", least cosine {min(cosines):.4f}" if cosines else ""
    print_from(session, f"{pluralize(len(vectors), 'text')}, {mean:.1f} ms each{least}")


def _show_vectors(text: str, vectors: TextVectors, cosine: str = "") -> None:
    values = vectors.array().reshape(-1)[:_SHOWN_VALUES]
    beginning = ", ".join(f"{value:+.4f}" for value in values)
    shape = " x ".join(map(str, vectors.shape))
    words = f"{one_line(text, _SHOWN_TEXT)}: [{beginning}, ...] ({shape}){cosine}"
    answers().print(words, markup=False)
