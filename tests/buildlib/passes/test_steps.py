"""Cut of a layer into steps: one after the other they compute what the layer does."""

from pathlib import Path

import numpy as np

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.graph import interface
from buildlib.graph.decoder import export_onnx
from buildlib.graph.shape import GraphShape
from buildlib.numerics.segment_loop import SegmentLoop
from buildlib.passes.steps import cut_into_steps


def test_steps_compute_what_the_layer_computes(tiny: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.load(tiny)
    path = export_onnx(checkpoint, GraphShape(8, 32), tmp_path)
    windows = np.random.default_rng(5).integers(0, 64, (2, 24)).tolist()
    with SegmentLoop(path, checkpoint.config, windows) as loop:
        hidden = loop.run(0, None)
        assert hidden is not None
        before, after = loop.borders(1)
        layer = loop.segment(1)
        inputs = [str(n.inputs[0].name) for n in layer.graph if n.op_type == "Gemm" and n.inputs[0]]
        names = list(dict.fromkeys(inputs))
        assert len(names) == 4
        steps = cut_into_steps(layer, names)
        values = {str(before): hidden}
        for step, name in zip(steps, [*names, after], strict=True):
            values |= loop.run_step(step, values)
            assert name in values
        whole = loop.run(1, hidden)
        assert whole is not None
        assert np.abs(values[str(after)] - whole).max() < 1e-5

        caches = [
            [str(value.name) for value in step.graph.outputs if interface.is_kv(str(value.name))]
            for step in steps
        ]
        assert list(map(len, caches)) == [0, 2, 0, 0, 0]
        sizes = [len(step.graph.initializers) for step in steps]
        assert sum(sizes) >= len(layer.graph.initializers)
        assert max(sizes) < len(layer.graph.initializers)


def test_a_step_with_nothing_to_compute_has_no_nodes(tiny: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.load(tiny)
    path = export_onnx(checkpoint, GraphShape(8, 32), tmp_path)
    with SegmentLoop(path, checkpoint.config, [[1] * 16]) as loop:
        layer = loop.segment(1)
        before, after = loop.borders(1)
        steps = cut_into_steps(layer, [str(before), str(after)])
        assert [bool(len(step.graph)) for step in steps] == [False, True, False]
