"""A database that the schema before made is brought up to date, and read."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from harness.errors import OlderSchemaError
from harness.store import engine, migrations, schema
from harness.store.store import ResultsStore

RUN = "0123456789abcdef" * 2
SCHEMA_1 = """
CREATE TABLE qnnfarm_schema (
    version INTEGER NOT NULL, applied_at DATETIME NOT NULL, qnnfarm_version VARCHAR(64) NOT NULL,
    PRIMARY KEY (version)
);
CREATE TABLE runs (
    id VARCHAR(32) NOT NULL, created_at DATETIME NOT NULL, finished_at DATETIME,
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
    repetition INTEGER NOT NULL, value DOUBLE NOT NULL,
    PRIMARY KEY (run_id, metric, is_warmup, repetition),
    FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
INSERT INTO qnnfarm_schema VALUES (1, '2026-01-01 00:00:00.000000', '0.1.0');
INSERT INTO runs VALUES (
    '0123456789abcdef0123456789abcdef', '2026-01-01 00:00:00.000000',
    '2026-01-01 00:01:00.000000', 'bench', 'done', NULL, '', 'tiny_llama',
    'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', 'SM8750', '[1, 32]', 192, 2,
    'phone', 'SM8750', 0, NULL, NULL, 'v79', 'arm64-v8a', '15',
    'genie_t2t_run.py', 64, 16, 1, 1, '{"greedy": true}', 'In the', NULL, NULL, NULL, NULL, NULL,
    'ort_qnn', '{}', '{}', '0.1.0', 'host', NULL, NULL, 'beginning'
);
INSERT INTO measurements VALUES
    ('0123456789abcdef0123456789abcdef', 'decode_tokens_per_s', 1, 0, 16.0);
INSERT INTO measurements VALUES
    ('0123456789abcdef0123456789abcdef', 'decode_tokens_per_s', 0, 0, 17.5);
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA_1)
    return path


@pytest.mark.parametrize("create", [True, False])
def test_what_was_measured_before_is_still_there(old: Path, *, create: bool) -> None:
    for _ in range(2):
        with ResultsStore.open(old, create=create) as store:
            run = store.get_run(RUN)
            assert store.telemetry(RUN) == ()
    assert run.values("decode_tokens_per_s") == (17.5,)
    assert (run.group_id, run.session, run.label, run.conditions) == (RUN, 0, "", ())
    assert (run.check.outcome, run.warmup_detected) == ("none", None)


def test_a_migrated_database_has_the_tables_of_a_new_one(old: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.db"
    for path in (old, new):
        ResultsStore.open(path).close()

    def shape(path: Path) -> dict[str, object]:
        with closing(sqlite3.connect(path)) as connection:
            tables = ("runs", "measurements", "telemetry", "qnnfarm_schema")
            indexes = connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
            )
            columns = {
                table: sorted(row[1:4] for row in connection.execute(f"PRAGMA table_info({table})"))
                for table in tables
            }
            return {"indexes": sorted(indexes), **columns}

    assert shape(old) == shape(new)


def test_a_migration_that_fails_changes_nothing(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = old.read_bytes()
    monkeypatch.setattr(
        migrations,
        "_GROUPS_AND_CONDITIONS",
        (*migrations._GROUPS_AND_CONDITIONS, "UPDATE runs SET no_such = 1"),
    )
    with pytest.raises(Exception, match="no such column"):
        ResultsStore.open(old)
    monkeypatch.undo()
    assert old.read_bytes() == before
    with ResultsStore.open(old) as store:
        assert len(store.list_runs()) == 1


def test_an_old_database_that_cannot_be_written_says_so(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root writes everything, the folder's answer and SQLite's are arranged."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    original = engine._sqlite_uri

    def read_only(path: Path, *, create: bool) -> str:
        del create
        return original(path, create=False)

    monkeypatch.setattr(engine, "_sqlite_uri", read_only)
    with pytest.raises(OlderSchemaError, match=f"schema 1, older than {schema.SCHEMA_VERSION}"):
        ResultsStore.open(old, create=False)
