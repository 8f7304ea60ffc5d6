"""`python -m tools.commits` on repositories of a test's own."""

import subprocess
from pathlib import Path

import pytest

from tools.commits import faults


@pytest.mark.needs("git")
@pytest.mark.parametrize(
    ("files", "message", "lacking"),
    [
        (["harness/a.py", "CHANGELOG.md"], "Pool: fair\n\nA second user waited for ever.", []),
        (["tests/a.py"], "tests: one scene\n\nTwo held the same.", []),
        (["harness/a.py"], "Pool: moved\n\nOne idea, one file.\n\nChangelog: none (moves)", []),
        (["harness/a.py"], "Pool: fair\n\nIt was not.", ["harness/a.py changes"]),
        (["harness/a.py"], "Pool: fair\n\nIt was not.\n\nChangelog: none", ["CHANGELOG.md"]),
        (["tests/a.py"], "tests: one scene", ["does not say why"]),
        (["tests/a.py"], "tests: one scene\n\nSigned-off-by: A <a@b>", ["does not say why"]),
    ],
)
def test_a_change_says_why_and_what_users_notice(
    tmp_path: Path, files: list[str], message: str, lacking: list[str]
) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    git("commit", "--allow-empty", "-qm", "begin")
    git("tag", "base")
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    git("add", ".")
    git("commit", "-qm", message)
    missing = faults("base", tmp_path)
    assert len(missing) == len(lacking)
    for fault, words in zip(missing, lacking, strict=True):
        assert words in fault
