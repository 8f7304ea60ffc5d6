"""The commands and the pytest plugin keep and read results in a real PostgreSQL database."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.devices.device import Device
from harness.results.metrics import Measurement
from harness.results.records import TelemetrySeries
from harness.results.store import ResultsStore
from tests.command_line import qnnfarm
from tests.harness.results.places import PostgresqlPlace, make_run
from tests.reports.test_cli import Command

IMPORTED = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # our packages, in this process
pytestmark = pytest.mark.timeout(900)


def test_a_report_of_a_servers_database(postgresql: PostgresqlPlace, tmp_path: Path) -> None:
    run = make_run(measurements=[Measurement(metric="decode_tokens_per_s", value=17.0)])
    with ResultsStore.open(postgresql.location) as store:
        with store.recording(run) as recorder:
            recorder.add_telemetry(
                [TelemetrySeries("temp_c:cpu", "degC", (0.0, 1.0), (30.0, 31.5))], repetition=0
            )
        store.begin_run(make_run())
    command = Command(postgresql.location, tmp_path / "report.html")
    told = command.printed("--json")
    assert command.out.read_text().count("tiny_llama")
    for text in (told, command.out.read_text()):
        assert postgresql.server.password not in text


def test_the_plugin_checks_a_servers_database_and_makes_nothing(
    pytester: pytest.Pytester, postgresql: PostgresqlPlace, new_port: Callable[[], int]
) -> None:
    pytester.makeini(
        "[pytest]\naddopts = -p no:cacheprovider -p no:xdist -p harness.pytest_plugin\n"
    )
    pytester.makepyfile("def test_one(): pass")
    fine = pytester.runpytest_inprocess(*IMPORTED, "--qnnfarm-db", postgresql.location)
    fine.assert_outcomes(passed=1)
    assert postgresql.server.password not in fine.stdout.str()
    assert postgresql.rows("SELECT tablename FROM pg_tables WHERE schemaname = 'public'") == []
    away = f"postgresql+psycopg://u:geheim@127.0.0.1:{new_port()}/results"
    refused = pytester.runpytest_inprocess(*IMPORTED, "--qnnfarm-db", away)
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [text for text in refused.stderr.lines if text]
    assert line.startswith(
        "ERROR: --qnnfarm-db: cannot use the results database postgresql+psycopg"
    )
    assert "refused" in line
    assert "geheim" not in line


PLAN = """
name: on-a-server
containers: [{{path: {container}, label: tiny}}]
conditions: none
telemetry: false
workloads:
  - {{kind: generate, prompt: In the beginning, max_tokens: 4, sessions: 2}}
"""


@pytest.mark.variant
def test_a_plan_goes_on_where_it_was(
    postgresql: PostgresqlPlace,
    virtual_device: Device,
    build_cache: Path,
    small_bundle: Path,
    tmp_path: Path,
) -> None:
    device = f"{{type: android, identifier: '{virtual_device.serial}'}}"
    (tmp_path / "pool.yaml").write_text(f"devices: [{device}]\n")  # others may be connected
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN.format(container=small_bundle))
    for option, runs in (("--dry-run", None), ("--json", 2), ("--json", 2)):
        ran = qnnfarm("run", plan, option, "--db", postgresql.location, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        assert postgresql.server.password not in ran.stdout + ran.stderr
        if runs is not None:
            with ResultsStore.open(postgresql.location, create=False) as store:
                assert [run.status for run in store.list_runs()] == ["done"] * runs
