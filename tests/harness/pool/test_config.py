from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.devices import spec
from harness.devices.spec import DeviceSpec
from harness.errors import ConfigFileError, HarnessError, PoolError
from harness.pool.config import PoolConfig, load_config, parse_config
from harness.pool.members import Member, configured_members
from harness.pool.notifications import run_program
from harness.pool.upkeep import fill_placeholders

_DOC = Path(__file__).parents[3] / "docs" / "pool.md"

_WHOLE = """\
devices:
  - name: bench-phone
    type: android
    identifier: R5CX12345@lab1
    tags: [bench, sm8750]
    power_cycle: [uhubctl, -l, "1-1", -a, cycle]
  - {name: board, type: linux, identifier: user@board}
  - {name: v1, type: virtual, identifier: v1, soc: SM8750}
  - {discover: adb, tags: [found], exclude: [emulator-5554]}
hosts:
  lab1: {adb_port: 5038, adb_server_ours: true}
adb_server: {ours: true}
recovery:
  steps: [reconnect, reboot]
  power_cycle: [hub, "{serial}", "--name={name}"]
  backoff_s: 5
quarantine: {limit: 2, backoff_s: 5}
lease: {ttl_s: 20}
"""


@pytest.mark.needs("plugins.ssh_devices", "plugins.virtual_android")
def test_a_whole_file() -> None:
    config = parse_config(_WHOLE)
    assert config.hosts["lab1"].adb_port == 5038
    assert config.recovery.steps == ("reconnect", "reboot")
    found = [DeviceSpec("android", serial) for serial in ("S1", "emulator-5554")]
    members = configured_members(config, lambda _: found, "pool.yaml")
    assert [member.name for member in members] == ["bench-phone", "board", "v1", "S1"]
    assert members[0].spec.host == "lab1"
    assert members[3].tags == {"found"}


@pytest.mark.parametrize(
    ("entry", "plugin"),
    [
        ("{type: linux, identifier: board}", "ssh_devices"),
        ("{type: android, identifier: R5CX@lab1}", "ssh_devices"),
        ("{discover: adb, host: lab1}", "ssh_devices"),
        ("{type: virtual, identifier: one}", "virtual_android"),
        ("{discover: virtual}", "virtual_android"),
    ],
)
def test_devices_without_their_plugin(
    monkeypatch: pytest.MonkeyPatch, entry: str, plugin: str
) -> None:
    types = spec.device_types()
    monkeypatch.setattr(spec, "device_types", lambda: {"android": types["android"]})
    with pytest.raises(ConfigFileError, match=rf"line 1, devices\[0\].*plugins/{plugin}"):
        parse_config(f"devices: [{entry}]")


def test_an_empty_file_is_all_devices_of_the_adb_server() -> None:
    assert parse_config("") == parse_config("# nothing\n") == PoolConfig()


@pytest.mark.parametrize(
    ("text", "line", "key", "said"),
    [
        ("devices: [}", 1, "", "expected"),
        ("devices:\n  - {type: phone, identifier: x}", 2, "devices[0].type", "android"),
        ("devices:\n  - type: android\n    identifier: 'a b'", 2, "devices[0]", "SERIAL"),
        ("devices:\n  - type: android\n    tags: [ok, 'not ok']", 3, "devices[0].tags", "match"),
        ("devices: []", 1, "devices", "name a device"),
        ("devices:\n  - {discover: adb, name: x}", 2, "devices[0]", "of their own"),
        ("devices:\n  - {name: x}", 2, "devices[0]", "either"),
        ("\nleases: {}", 2, "leases", "unknown key"),
        ("lease:\n  ttl_s: -1", 2, "lease.ttl_s", "at least 1"),
        ("lease:\n  ttl_s: .nan", 2, "lease.ttl_s", "finite|greater"),
        ("recovery: {power_cycle: rm -rf /}", 1, "recovery.power_cycle", "must be a list of texts"),
        ("devices:\n  - type: android\n    tags: cooled", 3, "devices[0].tags", "list of texts"),
        (
            "devices: {type: local}",
            1,
            "devices",
            "line 1, devices: must be a list$",
        ),
        ("recovery:\n  power_cycle: [hub, '{sreial}']", 2, "recovery.power_cycle", "{serial}"),
        (
            "devices:\n  - type: local\n    power_cycle: ['x{Name}']",
            3,
            "devices[0].power_cycle",
            "there is no {Name}, but {name}",
        ),
        pytest.param(
            "devices:\n  - type: virtual\n    identifier: a\n    soc: SM8751",
            4,
            "devices[0].soc",
            "no SoC 'SM8751': did you mean SM8750",
            marks=pytest.mark.needs("plugins.virtual_android"),
        ),
        (
            "devices:\n  - {type: local}\n  - {name: y, type: local}",
            3,
            "devices[1]",
            "local is given twice",
        ),
        (
            "devices:\n  - {name: b, type: local}\n  - {type: android, identifier: b}",
            3,
            "devices[1]",
            "two devices are named b",
        ),
        ("lease: {ttl: 3}\nhost: {}", 1, "lease.ttl", "; line 2, host: unknown key"),
        ("recovery:\n  steps: [reboot, reboot]", 2, "recovery.steps", "twice"),
        ("recovery:\n  steps: [burn]", 2, "recovery.steps[0]", "reconnect"),
        ("adb_server: {ours: true}\nadb_server: {ours: false}", 2, "adb_server", "twice"),
        ("lease: &x {ttl_s: -1}\nquarantine: *x", 1, "quarantine.ttl_s", "; line 1, lease.ttl_s"),
        ("devices: &x [*x]", 1, "devices[0]", "must be a mapping"),
        ("- 1", 1, "", "no mapping"),
        ("!!python/object/apply:os.system ['true']", None, "", "could not determine"),
        ("[" * 5000, None, "", "deep|expected"),
    ],
)
def test_errors_name_line_and_key(text: str, line: int | None, key: str, said: str) -> None:
    with pytest.raises(ConfigFileError, match=said) as caught:
        parse_config(text, "lab/pool.yaml")
    assert line is None or caught.value.line == line
    assert caught.value.key.startswith(key)
    assert str(caught.value).startswith("lab/pool.yaml")
    assert str(caught.value).isprintable()


def test_a_discovered_device_cannot_have_the_name_of_another() -> None:
    config = parse_config("devices:\n - {name: A, type: local}\n - {discover: adb}")
    found = [DeviceSpec("android", "A")]
    with pytest.raises(ConfigFileError, match=r"pool.yaml, devices\[1\]: it finds android:A"):
        configured_members(config, lambda _: found, "pool.yaml")


@pytest.mark.needs("plugins.virtual_android")
def test_a_virtual_device_that_exists_with_another_soc_is_refused() -> None:
    text = "devices:\n  - type: virtual\n    identifier: one\n    soc: sm8650"
    assert (
        parse_config(text, soc_of={DeviceSpec("virtual", "two"): "SM8750"}.get).devices[0].soc
        == "SM8650"
    )
    with pytest.raises(ConfigFileError, match="one exists with SoC SM8750, not SM8650") as caught:
        parse_config(text, soc_of={DeviceSpec("virtual", "one"): "SM8750"}.get)
    assert (caught.value.line, caught.value.key) == (4, "devices[0].soc")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a: b\x00", b"#" * (1 << 20) + b"\n"])
def test_files_that_are_not_text(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pool.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigFileError):
        load_config(path)
    with pytest.raises(ConfigFileError):
        load_config(tmp_path / "missing.yaml")
    with pytest.raises(ConfigFileError):
        load_config(tmp_path)


_leaf = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["adb", "virtual", "android", "reboot", "-x", "$(id)", "a\nb", "\x1b[31m"])
)
_keys = st.sampled_from(
    [*PoolConfig.model_fields, "name", "type", "identifier", "discover", "tags", "steps", "soc"]
) | st.text(max_size=8)
_values = st.recursive(
    _leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=4)
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(_keys, _values, max_size=5).map(yaml.safe_dump) | st.text())
def test_any_text_is_a_pool_or_a_one_line_error(text: str) -> None:
    said = ""
    try:
        configured_members(parse_config(text), lambda _: [], "pool.yaml")
    except HarnessError as error:
        said = str(error)
    assert not said or said.isprintable()


@given(st.text(min_size=1).filter(lambda text: "\0" not in text))
def test_placeholders_keep_the_arguments_of_a_command(hostile: str) -> None:
    member = Member(hostile, DeviceSpec("android", "S1"))
    words = fill_placeholders(
        ["hub", "{name}", "--serial={serial}", "{key}{name}", "{other}"], member, "{name}"
    )
    assert words == ["hub", hostile, "--serial=S1", "{name}" + hostile, "{other}"]


def test_a_users_command_is_run_without_a_shell(tmp_path: Path) -> None:
    hostile = f"$(touch {tmp_path}/owned); 'x"
    run_program(["touch", "--", str(tmp_path / hostile.replace("/", "_"))], 20)
    assert not (tmp_path / "owned").exists()
    with pytest.raises(PoolError, match="status 3: no such port"):
        run_program(["sh", "-c", "echo no such port >&2; exit 3"], 20)
    with pytest.raises(PoolError, match="cannot be run"):
        run_program([str(tmp_path / "missing")], 20)
    with pytest.raises(PoolError, match="longer than"):
        run_program(["sleep", "30"], 0.1)


@pytest.mark.needs("plugins.virtual_android", "plugins.ssh_devices")
def test_the_documented_file_is_valid() -> None:
    blocks = _DOC.read_text(encoding="utf-8").split("```yaml\n")[1:]
    assert blocks
    for block in blocks:
        parse_config(block.partition("```")[0])
