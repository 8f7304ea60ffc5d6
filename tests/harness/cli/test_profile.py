"""`qnnfarm profile` on the reference container, alone and beside itself."""

import json
from collections.abc import Callable

from buildlib.pipeline.build import BuildOutputs
from tests import command_line

Run = Callable[..., command_line.Done]


def test_two_containers_stand_side_by_side(qnnfarm: Run, reference_outputs: BuildOutputs) -> None:
    folder = reference_outputs.container
    shown = qnnfarm("profile", folder, folder, "--by", "layer", "--repetitions", "1")
    assert shown.returncode == 0, shown.stderr
    assert "say nothing about hardware" in shown.stdout
    (layer,) = {
        line.split()[0] + line.split()[1] + line.split()[2]
        for line in shown.stdout.splitlines()
        if line.startswith("layer_1 ")
    }
    nodes = layer.removeprefix("layer_1")
    assert nodes == nodes[: len(nodes) // 2] * 2  # as many in both
    one = json.loads(qnnfarm("profile", folder, "--json", "--repetitions", "1").stdout)
    (container,) = one["containers"]
    operator = container["graphs"]["ar1_cl192"]["layer_0_up_proj"]
    assert operator["weight_bytes"] > 0 < operator["cycles"]
