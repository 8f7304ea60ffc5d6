"""A tenth of a megabyte of the worst that a device can say, to all that reads what devices say.

A parser that is not linear takes minutes for it, with the interpreter locked: nothing in this
process could end it. So they run in one child process, whose CPU time and memory the kernel bounds.
Ten megabytes each are a campaign: `pytest -m variant tests/harness/test_hostile_output.py`.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from buildlib.error_base import QnnfarmError, one_line
from harness.clock import Deadline
from harness.codes import find_codes
from harness.deploy.digests import FileDigest, hashes_on
from harness.deploy.store import DeviceStore, EvictionPolicy, make_room, read_usage
from harness.devices.adb.client import AdbServer, parse_devices
from harness.devices.adb.transport import AdbTransport, ShellSession
from harness.devices.base import CommandResult, FailReply
from harness.devices.commands import BoundedOutput, Job
from harness.devices.device import Device, Transport
from harness.devices.local import LocalTransport
from harness.devices.properties import (
    linux_properties,
    parse,
    parse_battery,
    parse_df,
    parse_getprop,
    properties_from,
)
from harness.errors import DeviceCommandError, RunnerError
from harness.pool.fence import Fence, HigherTokenError, OtherHolderError
from harness.runtimes.base import Window
from harness.runtimes.deployed import parse_run_line
from harness.runtimes.genie.output import generated_text, parse_perplexity, parse_profile
from harness.runtimes.genie.runtime import GenieRuntime
from harness.telemetry.conditions import parse_records
from harness.telemetry.protocol import parse_recording
from harness.telemetry.readings import battery_of_service, temperatures_of_service
from harness.telemetry.throttling import judge_throttling
from harness.workloads.command import Command
from harness.workloads.session import Session
from plugins.virtual_android.auth import parse_public_key
from plugins.virtual_android.faults import parse_fault
from plugins.virtual_android.protocol import FrameDecoder
from plugins.virtual_android.shell import parse_shell_service, parse_window_size, starts_runner
from tests.command_line import Started

if TYPE_CHECKING:
    from harness.devices.adb.connection import Connection

SIZE = int(os.environ.get("QNNFARM_HOSTILE_BYTES", "2000000"))
LONGEST_S = max(10.0, SIZE / 300_000)
"""Of one parser with one input: linear ones take up to a second, quadratic ones minutes."""
LARGEST_BYTES = 6 << 30
SHA = "0123456789abcdef" * 4


def filled(piece: str) -> str:
    return piece * (SIZE // len(piece))


class SayingDevice(Device):
    """A device whose every command says the same."""

    work_root = "/data/local/tmp/qnnfarm"

    def __init__(self, output: str) -> None:
        super().__init__(LocalTransport())
        self._output = output

    def shell(self, *_: object, **_options: object) -> CommandResult:
        return CommandResult(0, self._output, self._output)


def saying(ask: Callable[[Device], object]) -> Callable[[str], object]:
    return lambda output: ask(SayingDevice(output))


def find_root(transport: Transport) -> Callable[[str], object]:
    return lambda output: transport.find_root(SayingDevice(output), 1.0)


def adopt(device: Device) -> object:
    store = DeviceStore(device, "/scripts", Deadline(60), EvictionPolicy())
    return store.holds([FileDigest(SHA, 1)])


def link(device: Device) -> object:
    store = DeviceStore(device, "/scripts", Deadline(60), EvictionPolicy())
    return store.link("run", [("file", FileDigest(SHA, 1), False)])


def refuse(reason: str) -> None:
    with AdbTransport(cast("AdbServer", None), "serial").typed("push", 1.0):
        raise FailReply(reason)


def decode(printed: str) -> object:
    context = SimpleNamespace(n_vocab=1000)
    config = SimpleNamespace(dialog=SimpleNamespace(context=context))
    runtime = SimpleNamespace(
        has_python=False,
        _container=SimpleNamespace(genie_config=config),
        device=SimpleNamespace(serial="hostile"),
    )
    return GenieRuntime._parse_ids(cast("GenieRuntime", runtime), printed)


def read_packets(data: str) -> object:
    left = [data.encode("latin-1")]
    connection = SimpleNamespace(
        wait=lambda **_: (True, False), receive_some=lambda _: left.pop(), send_some=len
    )
    sinks = BoundedOutput(1 << 20), BoundedOutput(1 << 20)
    with suppress(IndexError):
        return ShellSession(cast("Connection", connection), *sinks).run()
    return sinks[0].text(), sinks[1].text()


def greet(output: str) -> object:
    """In pieces of seven bytes, as a device may send it."""
    kept = BoundedOutput(1 << 20)
    stdout, _ = Job("true").outputs(kept, BoundedOutput(1), on_end=lambda: None)
    data = memoryview(output.encode())
    for start in range(0, 1 << 18, 7):
        stdout.write(data[start : start + 7])
    stdout.write(data[1 << 18 :])
    return kept.text()


def show_error(text: str) -> object:
    runner = RunnerError("serial", text, text, 1, text[-4000:])
    return [str(DeviceCommandError("serial", text, 1, text)), str(runner)]


def read_key(text: str) -> None:
    with suppress(ValueError):
        parse_public_key(text.encode())


def read_frames(text: str) -> None:
    decoder = FrameDecoder()
    data = text.encode("latin-1")
    while data:
        room = decoder.buffer()
        piece = data[: len(room)]
        room[: len(piece)] = piece
        decoder.commit(len(piece))
        data = data[len(piece) :] if len(data) < SIZE else b""


def run_command(device: Device) -> object:
    return Command(command=("true",)).run(Session(device))


WINDOWS = (Window("text", (1, 2)),)
HUGE_PERPLEXITY = {
    "format": 1, "perplexity": 1.7976931348623157e308, "positions": "first_cl_minus_ar",
    "n_tokens": 2, "retries": 0, "windows": [{"perplexity": 1.7976931348623157e308, "tokens": 2}],
}  # fmt: skip
ANY = ("\n", "9")
"""What many parsers read badly, each repeated."""


@dataclass(frozen=True)
class Parser:
    """One reader of what devices say.

    Attributes:
        pieces: repeated to make its own worst inputs.
        texts: more of them, which are no repetition.
    """

    read: Callable[[str], object]
    pieces: Sequence[str] = ()
    texts: Callable[[], Sequence[str]] = tuple

    def inputs(self) -> Iterator[tuple[str, str]]:
        for piece in (*ANY, *self.pieces):
            yield repr(piece), filled(piece)
        for number, text in enumerate(self.texts()):
            yield f"text {number}", text


PARSERS: dict[str, Parser] = {
    "getprop": Parser(
        lambda text: properties_from("serial", parse_getprop(text), None, None),
        [" ", "[", "[a]: [\n", "[a]: [", "[a\n", "[ro.soc.model]: [x]\n"],
    ),
    "linux": Parser(
        lambda text: linux_properties("serial", parse(text), None),
        ["\n@@", "PRETTY_NAME=", "\nPRETTY_NAME="],
        lambda: [
            "@@/proc/device-tree/compatible\n" + filled("qcom,x\n"),
            "@@/sys/devices/soc0/machine\n" + filled("x"),
        ],
    ),
    "df": Parser(parse_df, [" 1", " 1 2 3 ", "1%\n"]),
    "dumpsys battery": Parser(parse_battery, [" ", "a", "  level: ", "level: 5\n", "a "]),
    "battery service": Parser(battery_of_service, [" ", "  health: "]),
    "thermal service": Parser(temperatures_of_service, [" ", "Temperature{mValue=", " \n"]),
    "telemetry": Parser(
        lambda text: judge_throttling(parse_recording(text).series),
        ["s 1 0\n", "s 1 0 / ", "channel 0 mC temp_c\n", "s 9"],
        lambda: ["channel 0 mC temp_c:x\nchannel 1 Hz cpu_hz\n" + filled("s 1 0 90000 1000000\n")],
    ),
    "prepare.sh": Parser(parse_records, ["record|", "record|a|met|||\n", "|"]),
    "run.sh": Parser(parse_run_line, ["qnnfarm-run exit=", "\v"]),
    "generated text": Parser(lambda text: generated_text(text, "s"), ["\n[BEGIN]: ", "[END]"]),
    "token ids": Parser(decode, ["1 "]),
    "profile": Parser(
        lambda text: parse_profile(text, "serial"),
        ["[", '{"components":['],
        lambda: [
            '{"components": [' + filled("[],") + "[]]}",
            '{"components": [{"events": [' + filled("{},") + "{}]}]}",
            '{"components": [{"events": [{"init-time": ' + filled("9") + "}]}]}",
            '{"components": [{"events": [{"init-time": {"value": 1' + "0" * 400 + "}}]}]}",
            '{"components": [{"events": [{"init-time": [' + filled("0,") + "0]}]}]}",
        ],
    ),
    "perplexity": Parser(
        lambda text: parse_perplexity(text, WINDOWS, "serial"),
        ["[", '{"windows":['],
        lambda: [
            '{"windows": [' + filled("0,") + "0]}",
            json.dumps(HUGE_PERPLEXITY),
            '{"n_tokens": ' + filled("9") + "}",
        ],
    ),
    "hashes": Parser(saying(lambda d: hashes_on(d, "/", ["a"], timeout_s=1)), [f"{SHA}  a\n"]),
    "store usage": Parser(
        saying(lambda device: read_usage(device, Deadline(60))), [f"./{SHA} 1 1\n", "./.memo/"]
    ),
    "evict.sh": Parser(
        saying(lambda device: make_room(device, "/", Deadline(60), EvictionPolicy(), 1)),
        ["free_kb=\n", "qnnfarm-evict evicted="],
        lambda: [
            "free_kb=1\nstore_kb=1\nevictable_kb=1\nqnnfarm-evict evicted="
            + filled("9")
            + " evicted_kb=1 met=1\n"
        ],
    ),
    "verify.sh": Parser(
        saying(adopt), [f"ok {SHA}\n"], lambda: ["qnnfarm-verify ok=" + filled("\n")]
    ),
    "link.sh": Parser(saying(link), ["run_dir=/", "run_dir=/\n"]),
    "fence.sh": Parser(
        saying(lambda device: Fence("a", "a", device, 1).sweep(Deadline(60))),
        ["qnnfarm-fence token="],
        lambda: [
            f"qnnfarm-fence token=1 id={'0' * 36} ended={filled('9')} left=0",
            f"qnnfarm-fence refused=1 {'[' * 2000}",
            f'qnnfarm-fence held=1 alive=1 {{"user": {"9" * 1900}}}',
        ],
    ),
    "command": Parser(saying(run_command), [" \n"]),
    "boot id": Parser(saying(Device.boot_id)),
    "Android's folder": Parser(find_root(AdbTransport(cast("AdbServer", None), "serial")), ["/"]),
    "Linux' folder": Parser(find_root(LocalTransport()), ["/"]),
    "adb devices": Parser(parse_devices, [" ", "a b ", "a:b ", "a device x:y\n"]),
    "adb refusals": Parser(refuse, ["device '", "too many ", "device is"]),
    "adb shell": Parser(read_packets, ["\1\0\0\0\0", "\1\1\0\0\0x", "\1\xff\xff\xff\x7f"]),
    "greeting": Parser(greet, ["qnnfarm-job "]),
    "errors": Parser(show_error),
    "error codes": Parser(
        lambda text: find_codes(text.splitlines()),
        ["failed to ", "error ", "err: 5005\n", "0x8000", "-21474", "QNN_"],
    ),
    "one line": Parser(one_line),
    "device: adb messages": Parser(read_frames, ["\0"]),
    "device: shell names": Parser(
        lambda text: parse_shell_service(text.encode()), ["shell,", "shell,v2,TERM="]
    ),
    "device: runners": Parser(
        lambda text: starts_runner(text.encode()), ["run.sh ", "run.sh 1 1 -- ", " -- "]
    ),
    "device: window sizes": Parser(lambda text: parse_window_size(text.encode()), ["9x"]),
    "device: keys": Parser(read_key, ["A"]),
    "device: faults": Parser(parse_fault, ["drop:", "drop:at=1,"]),
}


@pytest.mark.parametrize(
    "size", [100_000, pytest.param(10_000_000, marks=pytest.mark.variant)], ids=["0.1 MB", "10 MB"]
)
def test_no_output_of_a_device_freezes_us(size: int) -> None:
    program = f"from {__name__} import main; main()"
    with Started("-c", program, env=os.environ | {"QNNFARM_HOSTILE_BYTES": str(size)}) as child:
        output, errors = child.communicate()
    told = [json.loads(line) for line in output.splitlines()]
    last = told[-1] if told else None
    assert child.returncode == 0, f"ended by {child.returncode} at {last}: {errors[-2000:]}"
    assert {entry["parser"] for entry in told} == set(PARSERS)


def main() -> None:
    """Give every parser all its inputs, each within its share of CPU time."""
    resource.setrlimit(resource.RLIMIT_AS, (LARGEST_BYTES, LARGEST_BYTES))
    only = sys.argv[1:]
    for name, parser in PARSERS.items():
        if only and name not in only:
            continue
        for label, text in parser.inputs():
            sys.stdout.write(json.dumps({"parser": name, "input": label}) + "\n")
            sys.stdout.flush()
            used = time.process_time()
            soft = int(used + LONGEST_S) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
            with suppress(QnnfarmError, HigherTokenError, OtherHolderError):
                parser.read(text)
            if only:
                sys.stderr.write(f"{time.process_time() - used:6.2f} s {name} {label}\n")


if __name__ == "__main__":
    main()
