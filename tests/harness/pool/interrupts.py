"""Ctrl-C at every line: an exception raised by the interpreter itself just before that line."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any


class Interrupter:
    """Raises KeyboardInterrupt before the line of that number (from 1) that runs in our modules."""

    def __init__(self, number: int, *modules: str) -> None:
        self._left = number
        self._modules = frozenset(modules)
        self.where = ""

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401
        if Path(frame.f_code.co_filename).name not in self._modules:
            return None
        if event == "line":
            self._left -= 1
            if not self._left:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace

    def run(self, act: Callable[[], object]) -> bool:
        """Whether it was interrupted, and not over before."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            act()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False
