"""The perplexity that a container should have: its model's, in float, on this host."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.config import load_config
from buildlib.container.container import GenAIContainer
from buildlib.graph.llama import export_onnx
from buildlib.graph.shape import GraphShape
from buildlib.reference.perplexity import onnx_perplexity
from harness.runtimes.base import Window


def float_perplexity(
    checkpoint: Path, container: GenAIContainer, windows: Sequence[Window]
) -> float:
    """Perplexity of a checkpoint over windows cut for a container.

    Raises:
        BuildError: the folder holds no checkpoint that can be exported.
    """
    graphs = container.metadata.graphs
    shape = GraphShape(max(graphs.auto_regression_numbers), graphs.context_length)
    with tempfile.TemporaryDirectory(prefix="qnnfarm-") as folder:
        model = export_onnx(Checkpoint.load(checkpoint), shape, Path(folder))
        config = load_config(checkpoint / "config.json")
        scored = [window.scored for window in windows]
        return onnx_perplexity({shape.ar: [model]}, config, scored)
