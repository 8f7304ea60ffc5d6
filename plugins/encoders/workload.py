"""The `embed` workload: texts through a text encoder, beside the same model in float."""

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from harness.errors import HostFileError, WrongUseError
from harness.results.records import OutputCheck, WorkloadRecord
from harness.runtimes.base import Model
from harness.runtimes.genie.runtime import GenieModel, GenieRuntime
from harness.words import pluralize
from harness.workloads.base import (
    UNRECORDED,
    NonEmpty,
    Recording,
    Workload,
    WorkloadResult,
    require_passed,
    summarize,
)
from harness.workloads.session import Session
from plugins.encoders.text_encoder import (
    EmbeddingResult,
    OnVectors,
    embed_texts,
    find_runner,
    with_output,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

COSINE, TIME = "cosine_float", "embed_s"
_MOST_TEXTS = 10_000
_NEAR = 0.98
"""Cosine from which embeddings count as those of the model in float, if no bound is set."""


@dataclass(frozen=True)
class Embeddings:
    """Embeddings of texts.

    Attributes:
        tokens: number of each text's tokens, before those beyond the context are cut off.
        cosines: of each text with the model in float on this host; empty without a reference.
    """

    texts: tuple[str, ...]
    result: EmbeddingResult
    tokens: tuple[int, ...]
    cosines: tuple[float, ...] = ()

    def arrays(self) -> "list[npt.NDArray[np.float32]]":
        """Return the encoder's output for each text: [1, embed], or [tokens, embed]."""
        return [vectors.array() for vectors in self.result.vectors]


class Embed(Workload):
    """Texts through a text encoder.

    Attributes:
        texts: to embed.
        file: or a file with one text a line.
        reference: folder or file of the ONNX that the container was built from, or a folder of
            sentence-transformers, which is exported; the host runs it in float, and the cosine of
            each text is a metric.
        min_cosine: below which the container counts as broken.
        per_token: a vector for each token, instead of one for the text.
    """

    kind: Literal["embed"] = "embed"
    texts: Annotated[
        tuple[NonEmpty, ...] | None,
        Field(min_length=1, max_length=_MOST_TEXTS, strict=False),
    ] = None
    file: NonEmpty | None = None
    reference: NonEmpty | None = None
    min_cosine: Annotated[float, Field(ge=-1, le=1)] | None = None
    per_token: bool = False

    input_keys: ClassVar[tuple[str, ...]] = ("file",)

    @model_validator(mode="after")
    def _one_source_and_what_it_is_held_against(self) -> Self:
        if (self.texts is None) == (self.file is None):
            raise ValueError("give either `texts` or a `file` with one text a line")
        if self.min_cosine is not None and self.reference is None:
            raise ValueError("`min_cosine` is the cosine with float: give its `reference`")
        if self.per_token and self.reference is not None:
            raise ValueError("`per_token`: a `reference` has one vector for a text")
        return self

    def check(self, model: Model) -> None:
        """See `Workload.check`."""
        if not isinstance(model, GenieModel):
            name = model.runtime.name
            raise WrongUseError(f"the runtime {name} cannot embed texts: use the runtime genie")
        _ = model.container.embedding_config

    def run(
        self,
        session: Session,
        recording: Recording = UNRECORDED,
        on_vectors: OnVectors | None = None,
    ) -> WorkloadResult[Embeddings]:
        """Embed the texts in one process on the device, those of the reference first.

        Args:
            on_vectors: as `embed_texts` has it.
        """
        runtime = session.runtime
        if not isinstance(runtime, GenieRuntime):
            raise WrongUseError(f"the runtime {runtime.name} cannot embed texts")
        config = with_output(session.container.embedding_config, pooled=not self.per_token)
        texts = self.texts or read_lines(session.resolve(self.file or ""))
        tokens, references = self._on_host(session, texts)
        record = WorkloadRecord(
            runner=find_runner(runtime),
            repetitions=len(texts),
            prompt=texts[0] if len(texts) == 1 else None,
            dataset_sha256=hashlib.sha256("\n".join(texts).encode()).hexdigest(),
        )
        with recording.start_if_stored(session, "embed", record) as recorder:
            result = embed_texts(runtime, texts, config, on_vectors)
            cosines = tuple(
                _cosine(vectors.array(), other)
                for vectors, other in zip(result.vectors, references, strict=bool(references))
            )
            if recorder is not None:
                recorder.add_values(result.metrics)
                for number, vectors in enumerate(result.vectors):
                    values = {TIME: vectors.seconds, "prompt_tokens": float(tokens[number])}
                    values |= {COSINE: cosines[number]} if cosines else {}
                    recorder.add_values(values, repetition=number)
                recorder.profiles.append(result.profile)
                recorder.traces.append(result.trace)
            require_passed(self._check_cosines(cosines, texts), recorder, session.device.serial)
        values = dict(result.metrics)
        values[TIME] = sum(vectors.seconds for vectors in result.vectors) / len(texts)
        if cosines:
            values[COSINE] = sum(cosines) / len(cosines)
        output = Embeddings(tuple(texts), result, tokens, cosines)
        run = recording.stored_run(recorder)
        return WorkloadResult(output, values, summarize(values), run)

    def _on_host(
        self, session: Session, texts: Sequence[str]
    ) -> "tuple[tuple[int, ...], Sequence[npt.NDArray[np.float32]]]":
        """Count the tokens of each text, and embed them in float if there is a reference."""
        from buildlib.builder.model_place import find_model
        from plugins.encoders.export import float_model
        from plugins.encoders.inputs import TextTokens, embed_in_float
        from plugins.encoders.interface import read_pooling

        embedding = session.container.embedding_config.embedding
        template = embedding.prompt.prompt_template if embedding.prompt else ("", "")
        tokens = TextTokens(session.model.tokenizer, template, embedding.context.ctx_size)
        counts = tuple(tokens.count(texts))
        if self.reference is None:
            return counts, ()
        place = find_model(self.reference, session.options.folder)
        pooling = read_pooling(place.folder)
        with tempfile.TemporaryDirectory(prefix="qnnfarm-") as scratch:
            model = float_model(place.path, Path(scratch))
            return counts, embed_in_float(model, tokens.of(texts), pooling)

    def _check_cosines(self, cosines: Sequence[float], texts: Sequence[str]) -> OutputCheck:
        if not cosines:
            return OutputCheck()
        least = min(cosines)
        summary = (
            f"the cosine with float of {pluralize(len(texts), 'text')} is at least {least:.4f}"
        )
        if self.min_cosine is None:
            return OutputCheck(outcome="passed" if least >= _NEAR else "none", reason=summary)
        if least >= self.min_cosine:
            return OutputCheck(outcome="passed", reason=summary)
        text = texts[cosines.index(least)][:60]
        reason = f"the cosine with float is {least:.4f}, below {self.min_cosine:g}, of {text!r}"
        return OutputCheck(outcome="failed", reason=reason)


def read_lines(path: Path) -> tuple[str, ...]:
    """Read a file of texts, one a line; empty lines are left out."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HostFileError(str(path), str(error)) from error
    return split_lines(content, str(path))


def split_lines(content: str, source: str) -> tuple[str, ...]:
    """Return the lines of a text that are not empty; errors call it `source`."""
    lines = tuple(line for line in content.replace("\0", " ").splitlines() if line.strip())
    if not 0 < len(lines) <= _MOST_TEXTS:
        reason = "holds no text" if not lines else f"has {len(lines)} lines"
        raise WrongUseError(f"{source} {reason}: give 1 to {_MOST_TEXTS} texts, one a line")
    return lines


def _cosine(vectors: "npt.NDArray[np.float32]", other: "npt.NDArray[np.float32]") -> float:
    from plugins.encoders.inputs import cosine

    return cosine(vectors, other) if vectors.size == other.size else 0.0
