"""`qnnfarm profile` on the small container, alone and beside itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.devices.device import Device
from tests.harness.cli.conftest import Run


@pytest.mark.variant
def test_two_containers_stand_side_by_side_and_a_device_profiles_them(
    qnnfarm: Run, small_bundle: Path, virtual_device: Device
) -> None:
    shown = qnnfarm("profile", small_bundle, small_bundle, "--by", "layer", "--repetitions", "1")
    assert shown.returncode == 0, shown.stderr
    assert "say nothing about hardware" in shown.stdout
    (layer,) = {
        line.split()[0] + line.split()[1] + line.split()[2]
        for line in shown.stdout.splitlines()
        if line.startswith("layer_0 ")
    }
    nodes = layer.removeprefix("layer_0")
    assert nodes == nodes[: len(nodes) // 2] * 2  # as many in both
    one = json.loads(qnnfarm("profile", small_bundle, "--json", "--repetitions", "1").stdout)
    (container,) = one["containers"]
    operator = container["graphs"]["ar1_cl192"]["layer_0_up_proj"]
    assert operator["weight_bytes"] > 0 < operator["cycles"]
    asked = ("--device", virtual_device.serial, "--json", "--repetitions", "1")
    done = qnnfarm("profile", small_bundle, *asked)
    assert done.returncode == 0, done.stderr
    on_device = json.loads(done.stdout)
    assert "HTP emulator" in on_device["measured"]

    def nodes_of(document: dict[str, Any]) -> dict[str, dict[str, int]]:
        (only,) = document["containers"]
        return {
            graph: {name: cost["nodes"] for name, cost in costs.items()}
            for graph, costs in only["graphs"].items()
        }

    assert nodes_of(on_device) == nodes_of(one)
    graphs = on_device["containers"][0]["graphs"]
    assert graphs["ar1_cl192"]["layer_0_up_proj"]["cycles"] > 0
