"""`StageRegistry`: the stages that recipes can name.

A package offers its own stages through the entry-point group `qnnfarm.pipeline_stages`: the entry's
name is the stage's, its object the class.
"""

import re
from collections.abc import Callable, Mapping
from typing import ClassVar, TypeVar

from buildlib.entry_points import entry_names, load_entry
from harness.errors import WrongUseError
from plugins.pipeline.stage import AnyStage, Stage

DOOR = "pipeline_stages"
BUILT_IN = ("model_loader", "quantization_opt", "quantization", "genai_builder")
"""Stages of this project, in the order in which they run."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_S = TypeVar("_S", bound=type[AnyStage])


class StageRegistry:
    """Stages by name: of installed packages, and those that this process has registered."""

    _registered: ClassVar[dict[str, type[AnyStage]]] = {}

    def register(self, name: str, stage: type[AnyStage]) -> None:
        """Add a stage, or replace one that this process has registered before.

        Raises:
            WrongUseError: the name is not lower-case letters, digits and underscores, or that of a
                stage of an installed package; or the class is no stage.
        """
        if not _NAME.fullmatch(name):
            raise WrongUseError(
                f"stage {name!r}: a name has lower-case letters, digits and underscores"
            )
        if name in entry_names(DOOR):
            raise WrongUseError(f"stage {name!r}: there is one of that name; choose another")
        self._registered[name] = _checked(name, stage)

    def unregister(self, name: str) -> None:
        """Forget a stage that this process has registered."""
        self._registered.pop(name, None)

    def stages(self) -> Mapping[str, type[AnyStage]]:
        """Return every stage by name, those of this project first."""
        here = entry_names(DOOR)
        names = dict.fromkeys((*(name for name in BUILT_IN if name in here), *here))
        found = {name: _checked(name, load_entry(DOOR, name)) for name in names}
        return found | self._registered


def _checked(name: str, stage: object) -> type[AnyStage]:
    if not (isinstance(stage, type) and issubclass(stage, Stage)):
        raise WrongUseError(
            f"stage {name!r}: {stage!r} is no class of plugins.pipeline.stage.Stage"
        )
    if stage.name not in {"", name}:
        raise WrongUseError(f"stage {name!r}: its class is registered as {stage.name!r}")
    stage.name = name
    return stage


def register_stage(name: str) -> Callable[[_S], _S]:
    """Register a class as the stage of a name: a decorator."""

    def register(stage: _S) -> _S:
        StageRegistry().register(name, stage)
        return stage

    return register
