"""The plugin beside other people's tests: it costs nothing, and speaks in one line."""

import sqlite3
import tomllib
from contextlib import closing
from pathlib import Path

import pytest

_HEAVY = ("adbutils", "numpy", "onnx", "paramiko", "pydantic", "rich", "sqlalchemy", "yaml")


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project of somebody who has the plugin installed."""
    pytester.makeini(
        "[pytest]\naddopts = -p no:cacheprovider -p no:xdist -p harness.pytest_plugin\n"
    )
    return pytester


def test_a_run_without_devices_loads_nothing_more(project: pytest.Pytester) -> None:
    project.makepyfile(
        f"""
        import sys

        def test_plain(tmp_path):
            names = {{name.partition(".")[0] for name in sys.modules}}
            assert "harness.pytest_plugin.hooks" in sys.modules
            assert names.isdisjoint({_HEAVY!r})
            ours = [n for n in sys.modules if n.startswith(("harness.", "buildlib"))]
            assert all(n.startswith("harness.pytest_plugin") for n in ours), ours
        """
    )
    project.runpytest_subprocess().assert_outcomes(passed=1)


@pytest.mark.needs("plugins.virtual_android")
def test_a_session_of_only_other_tests_opens_no_pool(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is read or written before a test asks for a device."""
    state = project.path / "state"
    monkeypatch.setenv("QNNFARM_STATE_DIR", str(state))
    project.makepyfile("def test_one(): pass")
    result = project.runpytest_inprocess("--device", "virtual:none")
    result.assert_outcomes(passed=1)
    assert "qnnfarm: devices virtual:none" in result.stdout.str()
    assert not state.exists()


@pytest.mark.parametrize(
    ("db", "shown"),
    [
        ("postgresql+psycopg://ann:se/cret@lab/results?password=secret", "ann@lab/results"),
        ("postgresql:///results?user=ann&password=secret", "postgresql:///results"),
        ("results.db", "results.db"),
    ],
)
def test_the_header_tells_no_password(project: pytest.Pytester, db: str, shown: str) -> None:
    project.makepyfile("def test_one(): pass")
    result = project.runpytest_inprocess("-o", f"qnnfarm_db={db}")
    (line,) = [text for text in result.outlines if text.startswith("qnnfarm: ")]
    assert line.endswith(shown)
    assert "cret" not in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "a b;c"], "--device: 'android:a b;c' names no device"),
        (["--pool", "bad.yaml"], "bad.yaml, line 1, device: "),
        (["--container", "nowhere"], "--container: there is no 'nowhere'"),
        (["--runtime", "geni"], "--runtime geni: no runtime is called 'geni': there are genie"),
        (["--repeat", "x"], "--repeat: 'x' is not a number of sessions"),
        (["--pool", "p.yaml", "--device", "local"], "give one of them, not both"),
        (["--suite-param", "a-b=1"], "--suite-param: 'a-b=' is not NAME=VALUE"),
        (["--suite-param", "ab"], "--suite-param: 'ab' is not NAME=VALUE"),
        (["-o", "qnnfarm_lease_timeout=soon"], "'soon' is not a number of seconds"),
        (["-o", "qnnfarm_run_timeout=-1"], "qnnfarm_run_timeout: '-1' is not a number of seconds"),
        (["-o", "qnnfarm_missing_device=ignore"], "'ignore' is neither skip nor fail"),
    ],
)
def test_an_option_that_cannot_be_used_is_one_line(
    project: pytest.Pytester, arguments: list[str], words: str
) -> None:
    (project.path / "p.yaml").write_text("")
    (project.path / "bad.yaml").write_text("device: [x]")
    project.makepyfile("def test_one(): pass")
    result = project.runpytest_inprocess(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert words in result.stderr.str()
    assert "Traceback" not in result.stderr.str()


@pytest.mark.parametrize(
    ("db", "words"),
    [
        ("nodir/x.db", "nodir/x.db: its folder does not exist"),
        ("some.txt", "some.txt: it is not a SQLite file"),
        ("other.db", "other.db: it holds the tables of another program"),
        ("postgresql+nosuch://ann:secret@lab/results", "postgresql+nosuch://"),
    ],
)
def test_a_store_that_cannot_be_used_is_one_line(
    project: pytest.Pytester, db: str, words: str
) -> None:
    (project.path / "some.txt").write_text("a letter to my aunt, and more of it")
    with closing(sqlite3.connect(project.path / "other.db")) as other, other:
        other.execute("CREATE TABLE songs (title TEXT)")
    project.makepyfile("def test_one(): raise AssertionError('it ran')")
    before = sorted(project.path.rglob("*"))
    result = project.runpytest_inprocess("--qnnfarm-db", db)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [text for text in result.stderr.lines if text]
    assert line.startswith("ERROR: --qnnfarm-db: ")
    assert words in line
    assert "secret" not in line
    left = [path for path in sorted(project.path.rglob("*")) if "__pycache__" not in path.parts]
    assert left == before


def test_ini_settings_are_relative_to_their_file(project: pytest.Pytester) -> None:
    (project.path / "farm").mkdir()
    (project.path / "farm" / "pool.yaml").write_text("")
    project.makeini(
        "[pytest]\naddopts = -p no:xdist -p harness.pytest_plugin\nqnnfarm_pool = farm/pool.yaml\n"
        "qnnfarm_db = results.db\nqnnfarm_repeat = 3\nqnnfarm_suite_params =\n  soak_s=7\n"
    )
    below = project.path / "below"
    below.mkdir()
    (below / "test_settings.py").write_text(
        "from harness.pytest_plugin.options import read_settings\n"
        "def test_it(pytestconfig, request):\n"
        "    found = read_settings(pytestconfig)\n"
        f"    assert str(found.pool) == {str(project.path / 'farm' / 'pool.yaml')!r}\n"
        f"    assert found.db == {str(project.path / 'results.db')!r}\n"
        "    assert (found.repeat, dict(found.params)) == (3, {'soak_s': '7'})\n"
    )
    project.runpytest_inprocess("below").assert_outcomes(passed=1)


def test_a_bad_pool_of_an_ini_file_is_one_line_of_the_tests_that_need_it(
    project: pytest.Pytester,
) -> None:
    (project.path / "pool.yaml").write_text("device: [x]")
    project.makeini(
        "[pytest]\naddopts = -p no:xdist -p harness.pytest_plugin\nqnnfarm_pool = pool.yaml\n"
    )
    project.makepyfile("def test_one(device): pass\ndef test_two(): pass")
    result = project.runpytest_inprocess()
    result.assert_outcomes(errors=1, passed=1)
    result.stdout.fnmatch_lines(["ConfigFileError: *pool.yaml, line 1, device: *"])
    result.stdout.no_fnmatch_line("*During handling*")


@pytest.mark.needs("plugins.virtual_android")
def test_the_command_line_wins_over_the_ini_file(project: pytest.Pytester) -> None:
    (project.path / "pool.yaml").write_text("")
    project.makeini(
        "[pytest]\naddopts = -p no:xdist -p harness.pytest_plugin\nqnnfarm_pool = pool.yaml\n"
        "qnnfarm_devices = virtual:a\nqnnfarm_suite_params =\n  x=1\n  y=2\n"
    )
    project.makepyfile(
        "from harness.pytest_plugin.options import read_settings\n"
        "def test_it(pytestconfig):\n"
        "    found = read_settings(pytestconfig)\n"
        "    assert (found.pool, found.devices) == (None, ('virtual:b',))\n"
        "    assert dict(found.params) == {'x': '1', 'y': '3'}\n"
    )
    result = project.runpytest_inprocess("--device", "virtual:b", "--suite-param", "y=3")
    result.assert_outcomes(passed=1)


def test_another_plugin_with_the_same_option_keeps_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        other="def pytest_addoption(parser):\n"
        "    parser.addoption('--device', default='cpu')\n"
        "    parser.addoption('--repeat', type=int)\n",
        test_both="from harness.pytest_plugin.options import read_settings\n"
        "def test_it(pytestconfig):\n"
        "    assert pytestconfig.getoption('--device') == 'cuda'\n"
        "    assert read_settings(pytestconfig).devices == ('local',)\n",
    )
    pytester.syspathinsert()
    result = pytester.runpytest_inprocess(
        "-p", "other", "-p", "harness.pytest_plugin", "--device=cuda", "--qnnfarm-device=local"
    )
    result.assert_outcomes(passed=1)


def test_fixtures_of_a_project_with_our_names_are_its_own(project: pytest.Pytester) -> None:
    (project.path / "c").mkdir()
    project.makeconftest(
        "import pytest\n"
        "@pytest.fixture\ndef device(): return 'cuda:0'\n"
        "@pytest.fixture\ndef pool(): return [1]\n"
        "@pytest.fixture\ndef container(): return {}\n"
    )
    project.makepyfile(
        "import pytest\n"
        "@pytest.mark.device('cuda')\n"
        "def test_it(device, pool, container): assert not container and pool and device\n"
        "@pytest.mark.device(index=3)\n"
        "def test_other(): pass\n"
    )
    project.runpytest_inprocess("--container", "c", "--repeat", "5").assert_outcomes(passed=2)


def test_entry_point_and_conftest_name_one_plugin() -> None:
    """Or pytest would load it twice, and end."""
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)["project"]["entry-points"]["pytest11"]
    assert entries == {"harness.pytest_plugin": "harness.pytest_plugin"}
