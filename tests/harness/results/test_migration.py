"""A database that the schema before made is brought up to date, and read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import inspect

from harness.errors import OlderSchemaError, StoreUnavailableError
from harness.results import database, schema
from harness.results.database import open_database
from harness.results.store import ResultsStore
from tests.harness.results.places import Place, SqlitePlace

pytestmark = pytest.mark.timeout(900)

RUN = "0123456789abcdef" * 2
SCHEMA_1 = """
CREATE TABLE qnnfarm_schema (
    version INTEGER NOT NULL, applied_at {moment} NOT NULL, qnnfarm_version VARCHAR(64) NOT NULL,
    PRIMARY KEY (version)
);
CREATE TABLE runs (
    id VARCHAR(32) NOT NULL, created_at {moment} NOT NULL, finished_at {moment},
    kind VARCHAR(32) NOT NULL, status VARCHAR(32) NOT NULL, error TEXT, writer TEXT NOT NULL,
    model TEXT NOT NULL, container_sha256 VARCHAR(64) NOT NULL, target TEXT NOT NULL,
    ars JSON NOT NULL, cl INTEGER NOT NULL, n_splits INTEGER NOT NULL,
    device_serial TEXT NOT NULL, soc TEXT NOT NULL, emulator BOOLEAN NOT NULL, device_model TEXT,
    device_manufacturer TEXT, dsp_arch TEXT, abi TEXT, android_version TEXT,
    runner TEXT NOT NULL, prompt_tokens INTEGER, max_new_tokens INTEGER,
    repetitions INTEGER NOT NULL, warmup INTEGER NOT NULL, sampler JSON NOT NULL, prompt TEXT,
    prompt_sha256 VARCHAR(64), dataset_sha256 VARCHAR(64), perplexity_positions VARCHAR(32),
    perplexity_windows INTEGER, perplexity_tokens INTEGER,
    toolchain TEXT NOT NULL, toolchain_versions JSON NOT NULL, library_versions JSON NOT NULL,
    qnnfarm_version TEXT NOT NULL, host TEXT NOT NULL, git_commit TEXT, git_dirty BOOLEAN,
    generated_text TEXT,
    PRIMARY KEY (id),
    CONSTRAINT failed_runs_have_an_error CHECK (status <> 'failed' OR error IS NOT NULL)
);
CREATE INDEX runs_by_subject ON runs (model, target, created_at);
CREATE TABLE measurements (
    run_id VARCHAR(32) NOT NULL, metric VARCHAR(64) NOT NULL, is_warmup BOOLEAN NOT NULL,
    repetition INTEGER NOT NULL, value {double} NOT NULL,
    PRIMARY KEY (run_id, metric, is_warmup, repetition),
    FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
INSERT INTO qnnfarm_schema VALUES (1, '2026-01-01 00:00:00.000000', '0.1.0');
INSERT INTO runs VALUES (
    '0123456789abcdef0123456789abcdef', '2026-01-01 00:00:00.000000',
    '2026-01-01 00:01:00.000000', 'bench', 'done', NULL, '', 'tiny_llama',
    'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', 'SM8750', '[1, 32]', 192, 2,
    'phone', 'SM8750', {no}, NULL, NULL, 'v79', 'arm64-v8a', '15',
    'genie_t2t_run.py', 64, 16, 1, 1, '{{"greedy": true}}', 'In the', NULL, NULL, NULL, NULL, NULL,
    'ort_qnn', '{{}}', '{{}}', '0.1.0', 'host', NULL, NULL, 'beginning'
);
INSERT INTO measurements VALUES
    ('0123456789abcdef0123456789abcdef', 'decode_tokens_per_s', {yes}, 0, 16.0);
INSERT INTO measurements VALUES
    ('0123456789abcdef0123456789abcdef', 'decode_tokens_per_s', {no}, 0, 17.5);
"""


_WORDS = {
    "sqlite": {"moment": "DATETIME", "double": "DOUBLE", "yes": "1", "no": "0"},
    "postgresql": {
        "moment": "TIMESTAMP WITH TIME ZONE", "double": "DOUBLE PRECISION", "yes": "true",
        "no": "false",
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
    place.run(SCHEMA_1.format(**_WORDS[place.engine]))
    return place


@pytest.mark.parametrize("create", [True, False])
def test_what_was_measured_before_is_still_there(old: Place, *, create: bool) -> None:
    for _ in range(2):
        with ResultsStore.open(old.location, create=create) as store:
            run = store.get_run(RUN)
            assert store.telemetry(RUN) == ()
    assert run.values("decode_tokens_per_s") == (17.5,)
    assert (run.group_id, run.session, run.label, run.conditions) == (RUN, 0, "", ())
    assert (run.check.outcome, run.warmup_detected) == ("none", None)
    assert run.container.precision is None


def test_processes_migrate_at_once(old: Place) -> None:
    command = [sys.executable, "-c", _OPEN, old.location]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    ended = [(process.communicate(timeout=600)[1], process.returncode) for process in started]
    assert ended == [("", 0)] * len(started)
    assert old.rows("SELECT version FROM qnnfarm_schema ORDER BY 1") == [
        (number,) for number in range(1, schema.SCHEMA_VERSION + 1)
    ]


def test_a_migrated_database_has_the_tables_of_a_new_one(old: Place) -> None:
    ResultsStore.open(old.location).close()
    migrated = _shape(old.location)
    old.run("DROP TABLE telemetry; DROP TABLE measurements; DROP TABLE runs;")
    old.run("DROP TABLE qnnfarm_schema")
    ResultsStore.open(old.location).close()
    assert _shape(old.location) == migrated


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
    assert len(found) == 4
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
    old.run(SCHEMA_1.format(**_WORDS[old.engine]))
    monkeypatch.setattr(os, "access", lambda *_: False)
    original = database._sqlite_uri

    def read_only(path: Path, *, create: bool) -> str:
        del create
        return original(path, create=False)

    monkeypatch.setattr(database, "_sqlite_uri", read_only)
    with pytest.raises(OlderSchemaError, match=f"schema 1, older than {schema.SCHEMA_VERSION}"):
        ResultsStore.open(old.location, create=False)
