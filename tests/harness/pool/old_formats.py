"""Ledgers as earlier versions wrote them."""

import sqlite3

_BACK = {
    6: """
    ALTER TABLE leases DROP COLUMN host;
    ALTER TABLE tickets DROP COLUMN host;
    """,
    5: """
    DROP INDEX evidence_by_work;
    ALTER TABLE evidence DROP COLUMN work;
    ALTER TABLE evidence DROP COLUMN excuse;
    ALTER TABLE devices DROP COLUMN good;
    """,
    4: """
    DROP TABLE totals;
    """,
    3: """
    ALTER TABLE devices DROP COLUMN probed;
    ALTER TABLE devices ADD COLUMN step_at REAL NOT NULL DEFAULT 0;
    UPDATE history SET text = 'token ' || token || ': ' || text WHERE token > 0;
    ALTER TABLE history DROP COLUMN token;
    """,
    2: """
    ALTER TABLE devices DROP COLUMN step;
    ALTER TABLE devices DROP COLUMN step_at;
    """,
    1: """
    ALTER TABLE devices DROP COLUMN root;
    ALTER TABLE devices DROP COLUMN quiet;
    DELETE FROM counters WHERE name = 'facts';
    """,
}
"""Statements that bring a ledger to a format from the next one."""


def downgrade(db: sqlite3.Connection, version: int) -> None:
    """Bring a ledger to an earlier format."""
    for number in range(max(_BACK), version - 1, -1):
        for statement in filter(str.strip, _BACK[number].split(";")):
            db.execute(statement)
    db.execute(f"PRAGMA user_version = {version}")
