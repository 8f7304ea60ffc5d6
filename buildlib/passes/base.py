"""Base of all passes: declared conditions around one transformation of a model."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from buildlib.encodings.attachment import attach, collect
from buildlib.encodings.files import load_encodings, save_encodings
from buildlib.error_base import one_line
from buildlib.errors import ModelFileError
from buildlib.graph.files import load_model, save_model
from buildlib.graph.values import static_shape

ENCODINGS_SUFFIX = ".encodings"

_HAS_ENCODINGS = "qnnfarm.encoded"


class PreconditionError(Exception):
    """A transformation cannot take the model; the text is one line. Becomes a `ModelFileError`."""


@dataclass(frozen=True)
class Condition:
    """A property of a model.

    Attributes:
        text: the condition in words.
        fault: returns what violates it, or None if it holds.
    """

    text: str
    fault: Callable[[ir.Model], str | None]


class Pass(ABC):
    """A transformation of an ONNX model that checks its preconditions and postconditions.

    Weights that a pass does not change stay where they lie: models are loaded with references to
    external data, and saved with these files linked beside the result. Encodings lie in a file
    beside the model with the suffix `.encodings`, and travel with its values.
    """

    name: str
    carries_encodings = True
    sorts_nodes = False
    requires: tuple[Condition, ...] = ()
    ensures: tuple[Condition, ...] = ()

    @abstractmethod
    def transform(self, model: ir.Model) -> ir.Model:
        """Return the transformed model: `model` itself, changed in place, or a new one.

        Raises:
            PreconditionError: something in the model cannot be transformed.
        """

    def run(self, source: Path, target: Path) -> Path:
        """Transform the file `source` into `target`; write nothing where a condition fails."""
        model = load_with_encodings(source, carries_encodings=self.carries_encodings)
        if self.sorts_nodes:
            _sort_nodes(model)
        check_conditions(self.name, "precondition", self.requires, model, source)
        try:
            result = self.transform(model)
        except PreconditionError as error:
            raise ModelFileError(source, f"pass {self.name}, precondition: {error}") from error
        check_conditions(self.name, "postcondition", self.ensures, result, source)
        return save_with_encodings(result, target)


def load_with_encodings(path: Path, *, carries_encodings: bool = True) -> ir.Model:
    """Load a model and attach the encodings that lie beside it."""
    model = load_model(path)
    encodings = path.with_suffix(ENCODINGS_SUFFIX)
    if carries_encodings and encodings.is_file():
        attach(model, load_encodings(encodings))
        model.meta[_HAS_ENCODINGS] = True
    return model


def save_with_encodings(model: ir.Model, path: Path) -> Path:
    """Save a model, and the encodings of its values if it was loaded with any."""
    if model.meta.get(_HAS_ENCODINGS):
        save_encodings(collect(model), path.with_suffix(ENCODINGS_SUFFIX))
    return save_model(model, path)


def check_conditions(
    name: str, stage: str, conditions: tuple[Condition, ...], model: ir.Model, path: Path
) -> None:
    """Raise if a condition of pass `name` does not hold for the model at `path`."""
    for condition in conditions:
        fault = condition.fault(model)
        if fault is not None:
            reason = f"pass {name}, {stage}: {condition.text}: {one_line(fault)}"
            raise ModelFileError(path, reason)


def _sort_nodes(model: ir.Model) -> None:
    """Sort nodes by dependency; `SORTED` reports a graph with a cycle."""
    if _unsorted(model) is not None:
        with contextlib.suppress(ValueError):
            model.graph.sort()


def _unsorted(model: ir.Model) -> str | None:
    names = {value.name for value in (*model.graph.inputs, *model.graph.initializers.values())}
    for node in model.graph:
        for value in node.inputs:
            if value is not None and value.name not in names:
                return f"{node.name} uses {value.name} before it is made"
        for value in node.outputs:
            if value.name and value.name in names:
                return f"{node.name} makes {value.name} a second time"
            names.update([value.name] if value.name else [])
    absent = [value.name for value in model.graph.outputs if value.name not in names]
    return f"output {absent[0]} is never made" if absent else None


def _dynamic_shape(model: ir.Model) -> str | None:
    for value in (*model.graph.inputs, *model.graph.outputs):
        if static_shape(value) is None:
            return f"{value.name} is {value.shape}"
    return None


def _quantized_node(model: ir.Model) -> str | None:
    for node in model.graph:
        if node.op_type in {"QuantizeLinear", "DequantizeLinear"}:
            return f"it has {node.op_type} {node.name}"
    return None


FLOAT = Condition("it is a float model", _quantized_node)
SORTED = Condition("every value is made once, before its use", _unsorted)
STATIC = Condition("inputs and outputs have static shapes", _dynamic_shape)
