"""Engines, nodes and pipelines of libGenie, for the runners beside this file (Python 3.8+).

A pipeline runs nodes; each node is a model with its own configuration. Measured on Genie 1.21: a
``text-generator`` node takes its text at port 0, and calls back for its text at any port.
"""

import ctypes
from typing import TYPE_CHECKING, List, Optional

if TYPE_CHECKING:
    from device_scripts import genie_api
else:  # beside this file on the device
    import genie_api

_TEXT_INPUT, _TEXT_OUTPUT = 0, 1


class EngineConfigHandle(genie_api.ConfigHandle):
    """A configuration of an engine of its own (``standalone-engine``)."""

    _kind = "GenieEngineConfig"


class EngineHandle(genie_api.LoadedHandle):
    """A loaded engine, for dialogs to use in place of their own."""

    _kind = "GenieEngine"


class NodeConfigHandle(genie_api.ConfigHandle):
    """A configuration of a node."""

    _kind = "GenieNodeConfig"


class NodeHandle(genie_api.LoadedHandle):
    """A model as a part of pipelines."""

    _kind = "GenieNode"

    def __init__(self, config: NodeConfigHandle) -> None:
        super().__init__(config)
        self._text = ctypes.create_string_buffer(b"")  # Genie reads it when the pipeline runs
        self._said: List[bytes] = []
        self._callback = genie_api.NodeTextFunction(self._take)
        name = "GenieNode_setTextCallback"
        self.genie.call(name, self.handle, _TEXT_OUTPUT, self._callback)

    def set_text(self, text: bytes) -> None:
        """Set the text that the node reads when its pipeline runs."""
        self._text = ctypes.create_string_buffer(text)
        pointer = ctypes.cast(self._text, ctypes.c_void_p)
        self.genie.call("GenieNode_setData", self.handle, _TEXT_INPUT, pointer, len(text), None)

    def take_text(self) -> bytes:
        """Return the output of the node since the last time."""
        text, self._said = b"".join(self._said), []
        return text

    def _take(self, piece: Optional[bytes], _code: int, _user: Optional[int]) -> None:
        if piece:
            self._said.append(piece)


class PipelineConfigHandle(genie_api.ConfigHandle):
    """A configuration of a pipeline."""

    _kind = "GeniePipelineConfig"


class PipelineHandle(genie_api.LoadedHandle):
    """Nodes that run together."""

    _kind = "GeniePipeline"

    def __init__(self, config: PipelineConfigHandle) -> None:
        super().__init__(config)
        self._nodes: List[NodeHandle] = []

    def add(self, node: NodeHandle) -> None:
        """Add a node, which must live as long as the pipeline."""
        self.genie.call("GeniePipeline_addNode", self.handle, node.handle)
        self._nodes.append(node)

    def execute(self) -> bytes:
        """Run all nodes, and return their output."""
        self.genie.call("GeniePipeline_execute", self.handle, None)
        return b"".join(node.take_text() for node in self._nodes)

    def reset(self) -> None:
        """Forget the conversation so far."""
        self.genie.call("GeniePipeline_reset", self.handle)

    def save(self, folder: str) -> None:
        """Save the state into a folder, which has to exist."""
        self.genie.call("GeniePipeline_save", self.handle, folder.encode())

    def restore(self, folder: str) -> None:
        """Restore the state that `save` wrote."""
        self.genie.call("GeniePipeline_restore", self.handle, folder.encode())
