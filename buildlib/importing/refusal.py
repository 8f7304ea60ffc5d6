"""`Refusal`, by which inner functions reject a source; the pass makes it an error for users."""

import onnx_ir as ir


class Refusal(Exception):  # noqa: N818  (importers turn it into an error)
    """A part of the source has no canonical form.

    Attributes:
        node: where; None when it is the model as a whole.
    """

    def __init__(self, reason: str, node: ir.Node | None = None) -> None:
        super().__init__(reason, node)
        self.reason = reason
        self.node = node
