"""How the importer's inner functions say no; the pass turns it into an error for the user."""

import onnx_ir as ir


class Refusal(Exception):  # noqa: N818  (never seen outside this package)
    """Something of the source that has no canonical form.

    Attributes:
        node: where; None when it is the model as a whole.
    """

    def __init__(self, reason: str, node: ir.Node | None = None) -> None:
        super().__init__(reason, node)
        self.reason = reason
        self.node = node
