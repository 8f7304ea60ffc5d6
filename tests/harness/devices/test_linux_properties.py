"""What a board says of itself."""

from hypothesis import given
from hypothesis import strategies as st

from harness.devices.properties import linux_properties, parse

_BOARD = """\
@@machine
aarch64
@@host
rb3

@@/proc/device-tree/model
Qualcomm Technologies, Inc. Robotics RB3gen2

@@/proc/device-tree/compatible
qcom,qcs6490-rb3gen2
qcom,qcm6490

@@/sys/devices/soc0/machine
SM8650

@@/sys/devices/soc0/serial_number
123456

@@/etc/os-release
NAME=x
PRETTY_NAME="Qualcomm Linux 1.4"
"""


def test_a_board() -> None:
    found = linux_properties("board", parse(_BOARD), 5)
    assert (found.soc, found.hexagon, found.abi, found.emulator) == (
        "SM8650", "v75", "aarch64", False,
    )  # fmt: skip
    assert found.model == "Qualcomm Technologies, Inc. Robotics RB3gen2"
    assert (found.manufacturer, found.hardware_serial) == ("qcom", "123456")
    assert (found.system, found.battery, found.free_bytes) == ("Qualcomm Linux 1.4", None, 5)


def test_the_device_tree_knows_where_the_kernel_does_not() -> None:
    said = {
        "/proc/device-tree/compatible": "acme,board\nqcom,sm8550",
        "/sys/devices/soc0/machine": "Unknown",
    }
    assert linux_properties("board", said, None).soc == "SM8550"
    del said["/proc/device-tree/compatible"]
    assert linux_properties("board", said, None).soc == "UNKNOWN"


def test_a_machine_that_says_nothing() -> None:
    found = linux_properties("board", {}, None)
    assert (found.soc, found.model, found.abi, found.emulator) == ("", "", "", True)


@given(st.text(max_size=300))
def test_any_output_is_survived(output: str) -> None:
    for text in (output, _BOARD.replace("SM8650", output)):
        found = linux_properties("board", parse(text), None)
        assert found.soc.isprintable()
        assert found.model.isprintable()
        assert found.system.isprintable()
