"""A database that the schema before made is brought up to date, and read."""

import os
from pathlib import Path

import pytest
from sqlalchemy import inspect

from harness.errors import OlderSchemaError, StoreUnavailableError
from harness.results import database, schema
from harness.results.database import open_database
from harness.results.store import ResultsStore
from tests.command_line import Started
from tests.harness.results.places import Place, SqlitePlace

pytestmark = pytest.mark.timeout(900)

RUN = "0123456789abcdef" * 2
RUN_COLUMNS = """
    id, created_at, finished_at, kind, status, error, writer, model, container_sha256, target,
    ars, cl, n_splits, device_serial, soc, emulator, dsp_arch, abi, android_version, runner,
    prompt_tokens, max_new_tokens, repetitions, warmup, sampler, prompt, toolchain,
    toolchain_versions, library_versions, qnnfarm_version, host, generated_text
"""
RUN_VALUES = """
    '0123456789abcdef0123456789abcdef', '2026-01-01 00:00:00.000000',
    '2026-01-01 00:01:00.000000', 'bench', 'done', NULL, '', 'tiny_llama',
    'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', 'SM8750', '[1, 32]', 192, 2,
    'phone', 'SM8750', {no}, 'v79', 'arm64-v8a', '15', 'genie_t2t_run.py', 64, 16, 1, 1,
    '{{"greedy": true}}', 'In the', 'ort_qnn', '{{}}', '{{}}', '0.1.0', 'host', 'beginning'
"""
SINCE_2 = ", group_id, session, label, conditions, check_outcome, check_reason"
VALUES_SINCE_2 = ", '0123456789abcdef0123456789abcdef', 0, '', '[]', 'none', ''"
SINCE_4 = ", clocks, labels"
VALUES_SINCE_4 = ", '{{}}', '{{}}'"
MEASURED = """
INSERT INTO measurements VALUES
    ('0123456789abcdef0123456789abcdef', 'decode_tokens_per_s', {yes}, 0, 16.0);
INSERT INTO measurements VALUES
    ('0123456789abcdef0123456789abcdef', 'decode_tokens_per_s', {no}, 0, 17.5);
"""
VERSIONS = tuple(range(1, schema.SCHEMA_VERSION))


def make_old(place: Place, version: int) -> None:
    """Make the database that qnnfarm with an older schema left behind."""
    tables = (Path(__file__).parent / "schemas" / f"schema_{version}.sql").read_text()
    columns, values = RUN_COLUMNS, RUN_VALUES
    if version >= 2:
        columns, values = columns + SINCE_2, values + VALUES_SINCE_2
    if version >= 4:
        columns, values = columns + SINCE_4, values + VALUES_SINCE_4
    script = f"""{tables}
        INSERT INTO qnnfarm_schema VALUES ({version}, '2026-01-01 00:00:00.000000', '0.1.0');
        INSERT INTO runs ({columns}) VALUES ({values});
        {MEASURED}"""  # noqa: S608  our own words
    place.run(script.format(**_WORDS[place.engine]))


_WORDS = {
    "sqlite": {
        "moment": "DATETIME", "double": "DOUBLE", "bytes": "BLOB", "yes": "1", "no": "0",
    },
    "postgresql": {
        "moment": "TIMESTAMP WITH TIME ZONE", "double": "DOUBLE PRECISION", "bytes": "BYTEA",
        "yes": "true", "no": "false",
    },
}  # fmt: skip
_OPEN = """
import sys
from harness.results.store import ResultsStore
ResultsStore.open(sys.argv[1]).close()
"""


@pytest.fixture
def old(place: Place) -> Place:
    """What qnnfarm with schema 1 left behind."""
    make_old(place, 1)
    return place


@pytest.mark.parametrize("version", VERSIONS)
def test_what_was_measured_before_is_still_there_in_the_tables_of_a_new_one(
    place: Place, version: int
) -> None:
    make_old(place, version)
    for create in (version % 2 == 0, False, True):
        with ResultsStore.open(place.location, create=create) as store:
            run = store.get_run(RUN)
            assert store.telemetry(RUN) == ()
            assert store.artifacts(RUN) == ()
    assert run.values("decode_tokens_per_s") == (17.5,)
    assert (run.group_id, run.session, run.label, run.conditions) == (RUN, 0, "", ())
    assert (run.check.outcome, run.warmup_detected) == ("none", None)
    assert run.container.precision is None
    assert (run.labels, run.device.clocks, run.origin) == ({}, {}, None)
    assert (run.concurrent_sessions, run.provenance.git_branch) == (None, None)
    migrated = _shape(place.location)
    for table in reversed(schema.metadata.sorted_tables):
        place.run(f"DROP TABLE {table.name}")
    ResultsStore.open(place.location).close()
    assert _shape(place.location) == migrated


def test_processes_migrate_at_once(old: Place) -> None:
    started = [Started("-c", _OPEN, old.location) for _ in range(3)]
    ended = [(process.communicate(timeout=600)[1], process.returncode) for process in started]
    assert ended == [("", 0)] * len(started)
    assert old.rows("SELECT version FROM qnnfarm_schema ORDER BY 1") == [
        (number,) for number in range(1, schema.SCHEMA_VERSION + 1)
    ]


def _shape(location: str) -> dict[str, object]:
    opened = open_database(location, create=False)
    with opened.reading() as connection:
        inspector = inspect(connection)
        found = {
            table: (
                sorted(
                    (str(column["name"]), str(column["type"]), column["nullable"])
                    for column in inspector.get_columns(table)
                ),
                inspector.get_pk_constraint(table)["constrained_columns"],
                [key["options"] for key in inspector.get_foreign_keys(table)],
                sorted(str(index["name"]) for index in inspector.get_indexes(table)),
                [check["name"] for check in inspector.get_check_constraints(table)],
            )
            for table in inspector.get_table_names()
        }
    opened.close()
    assert len(found) == len(schema.metadata.tables)
    return dict(found)


def test_a_migration_that_fails_changes_nothing(
    old: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _content(old)
    monkeypatch.setattr(
        schema,
        "_GROUPS_AND_CONDITIONS",
        (*schema._GROUPS_AND_CONDITIONS, "UPDATE runs SET no_such = 1"),
    )
    with pytest.raises(StoreUnavailableError, match="no_such"):
        ResultsStore.open(old.location)
    monkeypatch.undo()
    assert _content(old) == before
    with ResultsStore.open(old.location) as store:
        assert len(store.list_runs()) == 1


def _content(place: Place) -> list[list[tuple[object, ...]]]:
    return [place.rows("SELECT * FROM runs"), place.rows("SELECT * FROM qnnfarm_schema")]


def test_an_old_database_that_cannot_be_written_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root writes everything, the folder's answer and SQLite's are arranged."""
    old = SqlitePlace(tmp_path / "old.db")
    make_old(old, 1)
    monkeypatch.setattr(os, "access", lambda *_: False)
    original = database._sqlite_uri

    def read_only(path: Path, *, create: bool) -> str:
        del create
        return original(path, create=False)

    monkeypatch.setattr(database, "_sqlite_uri", read_only)
    with pytest.raises(OlderSchemaError, match=f"schema 1, older than {schema.SCHEMA_VERSION}"):
        ResultsStore.open(old.location, create=False)
