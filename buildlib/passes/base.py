"""What every pass is: declared conditions around one transformation of a model."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from buildlib.encodings.attached import attach, collect
from buildlib.encodings.model import Encodings
from buildlib.errors import PassError
from buildlib.graph.files import load_model, save_model
from buildlib.graph.infer import static_shape

ENCODINGS_SUFFIX = ".encodings"


@dataclass(frozen=True)
class Condition:
    """Something that holds for a model.

    Attributes:
        text: the condition in words.
        fault: says what breaks it, or None when it holds.
    """

    text: str
    fault: Callable[[ir.Model], str | None]


class Pass(ABC):
    """A transformation of one ONNX model that checks what it needs and what it promises.

    Weights that a pass does not change stay where they lie: models are loaded with their external
    data as references, and saved with these files linked beside the result. Encodings of a model
    lie in a file of its name with the suffix `.encodings`, and travel with its values.
    """

    name: str
    carries_encodings = True
    requires: tuple[Condition, ...] = ()
    ensures: tuple[Condition, ...] = ()

    @abstractmethod
    def transform(self, model: ir.Model) -> ir.Model:
        """The transformed model: `model` itself, changed in place, or a new one."""

    def run(self, source: Path, target: Path) -> Path:
        """Transform the file `source` into `target`.

        Raises:
            ModelFileError: `source` is no sound model.
            EncodingsError: the encodings beside it are not those of this model.
            PassError: a condition does not hold; nothing is written then.
        """
        model = load_model(source)
        encodings = source.with_suffix(ENCODINGS_SUFFIX)
        carries = self.carries_encodings and encodings.is_file()
        if carries:
            attach(model, Encodings.load(encodings))
        self._check("precondition", self.requires, model, source)
        result = self.transform(model)
        self._check("postcondition", self.ensures, result, source)
        if carries:
            collect(result).save(target.with_suffix(ENCODINGS_SUFFIX))
        return save_model(result, target)

    def _check(
        self, stage: str, conditions: tuple[Condition, ...], model: ir.Model, path: Path
    ) -> None:
        for condition in conditions:
            fault = condition.fault(model)
            if fault is not None:
                raise PassError(self.name, stage, path, f"{condition.text}: {fault}")


def _unsorted(model: ir.Model) -> str | None:
    known = {value.name for value in (*model.graph.inputs, *model.graph.initializers.values())}
    for node in model.graph:
        for value in node.inputs:
            if value is not None and value.name not in known:
                return f"{node.name} uses {value.name} before it is made"
        known.update(value.name for value in node.outputs)
    missing = [value.name for value in model.graph.outputs if value.name not in known]
    return f"output {missing[0]} is never made" if missing else None


def _dynamic(model: ir.Model) -> str | None:
    for value in (*model.graph.inputs, *model.graph.outputs):
        if static_shape(value) is None:
            return f"{value.name} is {value.shape}"
    return None


SORTED = Condition("every value is made once, before its use", _unsorted)
STATIC = Condition("inputs and outputs have static shapes", _dynamic)
