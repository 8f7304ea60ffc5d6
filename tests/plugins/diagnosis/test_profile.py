"""`qnnfarm profile` on the small container, here and on a device."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.devices.device import Device
from tests.harness.cli.conftest import Run


@pytest.mark.variant
def test_a_device_profiles_the_nodes_that_the_emulator_does(
    qnnfarm: Run, small_bundle: Path, virtual_device: Device
) -> None:
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
