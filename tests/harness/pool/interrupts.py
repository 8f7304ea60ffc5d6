"""Ctrl-C at a chosen line: the interpreter raises KeyboardInterrupt just before it."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any


class Interrupter:
    """Raises KeyboardInterrupt before the line of that number (from 1) that runs in our code.

    Args:
        code: modules, and packages for all modules in them.
    """

    def __init__(self, number: int, *code: ModuleType) -> None:
        self._left = number
        files = [Path(module.__file__ or "") for module in code]
        self._modules = {str(file) for file in files}
        self._packages = {str(file.parent) for file in files if file.name == "__init__.py"}
        self.where = ""

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401
        file = frame.f_code.co_filename
        if file not in self._modules and file.rpartition("/")[0] not in self._packages:
            return None
        if event == "line":
            self._left -= 1
            if not self._left:
                self.where = f"{Path(file).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace

    def run(self, act: Callable[[], object]) -> bool:
        """Run `act`; return whether it was interrupted before its end."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            act()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False
