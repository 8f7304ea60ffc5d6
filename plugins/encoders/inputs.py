"""Texts as the inputs of an encoder, as Genie makes them, and their embeddings in float."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from buildlib.checkpoint.tokenizer import load_tokenizer
from buildlib.errors import ModelFileError
from buildlib.numerics.runners import run_session
from plugins.encoders import interface

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TextTokens:
    """Tokens of a text by an encoder's tokenizer.

    Attributes:
        template: text before and after each prompt.
        length: more tokens are cut off, as Genie does it.
    """

    tokenizer: Path
    template: tuple[str, str]
    length: int

    def of(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        return [ids[: self.length] for ids in self._encoded(texts)]

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text, of which the first `length` count."""
        return [len(ids) for ids in self._encoded(texts)]

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        encoder = load_tokenizer(self.tokenizer)
        before, after = self.template
        return [
            encoder.encode(f"{before}{text}{after}", add_special_tokens=False).ids for text in texts
        ]


def padded_inputs(
    tokens: Sequence[int], length: int, padding: int
) -> dict[str, npt.NDArray[np.int32]]:
    """Return the four inputs of the graph for a text, as Genie 1.21 makes them: padding first."""
    start, count = length - len(tokens), len(tokens)
    ids = np.full((1, length), padding, np.int32)
    ids[0, start:] = tokens
    places = np.zeros((1, length), np.int32)
    places[0, start:] = np.arange(count)
    return {
        interface.INPUT_IDS: ids,
        interface.TOKEN_TYPE_IDS: np.zeros((1, length), np.int32),
        interface.POSITION_IDS: places,
        interface.ATTENTION_MASK: (np.arange(length)[None] >= start).astype(np.int32),
    }


def embed_in_float(
    model_path: Path,
    tokens: Sequence[Sequence[int]],
    pooling: interface.Pooling = interface.Pooling(),  # noqa: B008  (frozen)
) -> list[Vector]:
    """Embed texts on this host with an encoder's ONNX as its exporter wrote it.

    Nothing of the builder is in the way, so a difference from it is the builder's or the device's
    doing. Each text runs at its own length where the model takes any.

    Args:
        model_path: the export.
        tokens: of each text.
        pooling: where the model gives hidden states alone.
    """
    import onnxruntime as ort

    try:
        session = ort.InferenceSession(model_path, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime raises a dozen private kinds
        raise ModelFileError(model_path, str(error).splitlines()[0][:200]) from error
    outputs = {each.name for each in session.get_outputs()}
    pooled = next((name for name in interface.POOLED_NAMES if name in outputs), None)
    hidden = next((name for name in interface.SEQUENCE_NAMES if name in outputs), None)
    name = pooled or hidden
    if name is None:
        raise ModelFileError(model_path, "it gives neither a sentence embedding nor hidden states")
    vectors = []
    for ids in tokens:
        (result,) = run_session(model_path, session, [name], _feeds(session, ids))
        if pooled is None:
            states = result[0, : len(ids)]
            result = states[0] if pooling.mode == "cls" else states.mean(axis=0)
        vector = np.asarray(result, np.float32).reshape(-1)
        vectors.append(vector / (np.linalg.norm(vector) or 1) if pooling.normalized else vector)
    return vectors


def _feeds(session: Any, ids: Sequence[int]) -> dict[str, npt.NDArray[Any]]:  # noqa: ANN401
    """Return inputs of the model in its own types, as long as the text or as the model insists."""
    inputs = {each.name: each for each in session.get_inputs()}
    fixed = inputs[interface.INPUT_IDS].shape[1] if interface.INPUT_IDS in inputs else None
    length = fixed if isinstance(fixed, int) else len(ids)
    count = min(length, len(ids))
    whole = {
        name: np.roll(values, count - length, axis=1)  # padding last, as exporters have it
        for name, values in padded_inputs(ids[:count], length, 0).items()
    }
    types = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(float)": np.float32}
    return {
        name: whole[name].astype(types.get(each.type, np.int64))
        for name, each in inputs.items()
        if name in whole
    }


def cosine(one: Vector, other: Vector) -> float:
    """Return the cosine of the angle between two vectors; 0 if one is all zeros."""
    a, b = one.astype(np.float64).ravel(), other.astype(np.float64).ravel()
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths else 0.0
