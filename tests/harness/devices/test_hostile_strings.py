"""No string gets to a shell as anything but itself, and none gets out of its place."""

import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from harness.devices.base import PushItem
from harness.devices.device import Device
from harness.errors import DeviceCommandError, DeviceError, DeviceTransferError

_ODD = [
    "'", '"', "\\", "$(touch /tmp/pwned)", "`id`", "\n", ";", "&", "|", ">", "*", "~", "-n", " ",
    "\x1b[31m", "\u202e", "${IFS}", "$$", "!", "#", "\t", "\r", "漢", "%s", "\x7f",
]  # fmt: skip

texts = st.one_of(
    st.lists(st.sampled_from(_ODD), max_size=6).map("".join),
    st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=40),
)
names = texts.filter(
    lambda text: text not in {"", ".", ".."} and "/" not in text and len(text.encode()) < 200
)

some = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
_numbers = itertools.count()


@some
@given(words=st.lists(texts, min_size=1, max_size=5), value=texts)
@example(words=["-n", "--", "a'b"], value="'; exit 9; '")
@example(words=["", "a b", "*", "~", "$HOME"], value="$HOME")
def test_words_and_values(any_device: Device, words: list[str], value: str) -> None:
    result = any_device.shell(["printf", "<%s>", *words], env={"V": value})
    assert result.stdout == "".join(f"<{word}>" for word in words)
    assert any_device.shell('printf %s "$V"', env={"V": value}).stdout == value
    seen: list[bytes] = []
    any_device.stream(["printf", "<%s>", *words], on_output=seen.append, timeout_s=30)
    assert b"".join(seen).decode() == "".join(f"<{word}>" for word in words)


@some
@given(folder=names, name=names, content=st.binary(max_size=200))
@example(folder="a\nb", name="-rf", content=b"")
@example(folder="'$(id)'", name="x,0644", content=b"\0")
def test_paths(
    any_device: Device,
    any_folder: str,
    local_folder: Path,
    folder: str,
    name: str,
    content: bytes,
) -> None:
    local = local_folder / "file"
    local.write_bytes(content)
    own = f"{any_folder}/{next(_numbers)}"
    remote = f"{own}/{folder}/{name}"
    assert any_device.push(local, remote) == len(content)
    assert any_device.push_many([PushItem(local, f"{remote}2")]) == len(content)
    assert any_device.shell(["cat", "--", remote]).stdout.encode("utf-8", "replace") is not None
    count = any_device.shell(f'find {own} | tr "\\n" x | wc -c').stdout.strip()
    expected = [own, f"{own}/{folder}", remote, f"{remote}2"]
    assert int(count) == sum(len(path.encode()) + 1 for path in expected)
    back = local_folder / "back" / "here"
    assert any_device.pull(remote, back) == len(content)
    assert back.read_bytes() == content


@pytest.mark.parametrize("remote", ["../../escaped", "/etc/../etc/hostname", "a/../../../escaped"])
def test_a_pulled_file_lies_where_it_was_to_lie(
    any_device: Device, any_folder: str, local_folder: Path, remote: str
) -> None:
    target = local_folder / "in" / "file"
    try:
        any_device.pull(remote, target)
    except DeviceTransferError:
        assert not target.exists()
    found = {path.relative_to(local_folder) for path in local_folder.rglob("*")}
    assert found <= {Path("in"), Path("in/file")}


def test_a_link_in_the_place_of_a_pulled_file_leads_nowhere(
    any_device: Device, any_folder: str, local_folder: Path
) -> None:
    victim = local_folder / "victim"
    victim.write_text("mine")
    target = local_folder / "target"
    target.symlink_to(victim)
    local = local_folder / "file"
    local.write_text("theirs")
    any_device.push(local, f"{any_folder}/file")
    any_device.pull(f"{any_folder}/file", target)
    assert victim.read_text() == "mine"
    assert not target.is_symlink()
    assert target.read_text() == "theirs"


@some
@given(text=texts)
@example(text="\x1b]0;title\x07\r\nfake: all is well")
def test_output_of_a_device_stays_on_one_line(
    any_device: Device, local_folder: Path, text: str
) -> None:
    with pytest.raises(DeviceCommandError) as caught:
        any_device.shell('printf %s "$V" >&2; exit 1', env={"V": text})
    assert str(caught.value).isprintable()
    with pytest.raises(DeviceError) as failed:
        any_device.pull(f"/nowhere/{text}", local_folder / "never")
    assert str(failed.value).isprintable()


def test_a_path_with_a_nul_is_refused(any_device: Device, local_folder: Path) -> None:
    local = local_folder / "file"
    local.write_text("x")
    with pytest.raises(DeviceTransferError):
        any_device.push(local, "/tmp/a\0b")  # noqa: S108 - a path of the device
