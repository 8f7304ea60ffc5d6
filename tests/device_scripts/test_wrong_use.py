"""What no script takes: it says so, and does nothing."""

import pytest

from tests.device_scripts.conftest import DeviceShell

_CASES = """
run.sh
run.sh RUN 5 log
run.sh RUN 0 log -- true
run.sh RUN 99999999999 log -- true
run.sh RUN 5 log true true
run.sh /nonexistent 5 log -- true
run.sh RUN 5 no/such/folder/log -- true
run.sh -m x RUN 5 log -- true
telemetry.sh
telemetry.sh list
telemetry.sh arm RUN
telemetry.sh arm RUN 4
telemetry.sh arm RUN 6001
telemetry.sh sample RUN 10 5 $(id) 2 3 4
evict.sh ROOT
evict.sh ROOT 1 x
evict.sh ROOT -1 -
evict.sh ROOT 1 2 3
prepare.sh
prepare.sh apply
prepare.sh undo ROOT
prepare.sh apply ROOT reboot
prepare.sh apply ROOT governor=../x
fence.sh ROOT claim
fence.sh ROOT claim 0 HOLDER
fence.sh ROOT claim 01 HOLDER
fence.sh ROOT claim 1000000000 HOLDER
fence.sh ROOT claim $(id) HOLDER
fence.sh ROOT drop 1 HOLDER
fence.sh relative claim 1 HOLDER
fence.sh ROOT claim 1 $(id)
"""


@pytest.mark.parametrize("words", _CASES.strip().splitlines())
def test_wrong_use(device: DeviceShell, words: str) -> None:
    script, *arguments = words.split()
    root, run = str(device.work_root), str(device.make_run())
    known = {"RUN": run, "ROOT": root, "HOLDER": "a1-n {}"}
    done = device.run(script, *(known.get(word, word) for word in arguments))
    assert (done.returncode, done.stdout) == (125 if script == "run.sh" else 2, "")
    assert done.stderr.startswith("error: ")
    assert not (device.work_root / "fence").exists()
