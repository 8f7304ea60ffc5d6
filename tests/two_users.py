"""Two users of this system who share a ledger: real accounts, each in processes of its own."""

import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.command_line import QNNFARM, Started
from tests.system import needs, program, python_for_others

ANN, BOB = "daemon", "nobody"
GROUP = 100
"""Debian's group `users`; a process may have a group without a name."""
TIMEOUT_S = 120


_AS_USER = """
import os
os.setgroups({groups})
os.setgid({gid})
os.setuid({uid})
os.umask({umask})
os.dup2(1, 2)
"""


@dataclass
class SharedFolder:
    """A folder of a group, and the users who run programs on its ledger."""

    folder: Path
    ledger: Path
    python: str
    running: list[Started] = field(default_factory=list)

    def command(
        self, user: str, words: Sequence[str], umask: int, groups: Sequence[int]
    ) -> list[str]:
        account = pwd.getpwnam(user)
        become = [
            str(program("setpriv")), f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}",
            f"--groups={','.join(map(str, groups)) or account.pw_gid}",
        ]  # fmt: skip
        return [*become, "sh", "-c", f'umask {umask:03o}; exec "$@"', "sh", *words]

    def environment(self, user: str) -> dict[str, str]:
        home = self.folder / f"home-{user}"
        if not home.exists():
            home.mkdir(mode=0o700)
            os.chown(home, pwd.getpwnam(user).pw_uid, -1)
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "USER": "root",  # a name that anybody may claim
            "LOGNAME": "root",
            "QNNFARM_STATE_DIR": str(self.ledger),
            "QNNFARM_POOL": str(self.folder / "pool.yaml"),
        }

    def start(
        self,
        user: str,
        program: str,
        *words: str | Path,
        umask: int = 0o077,
        groups: Sequence[int] = (GROUP,),
    ) -> Started:
        """Start a program of Python as a user, whose errors are printed as its answers are."""
        account = pwd.getpwnam(user)
        ids = {"uid": account.pw_uid, "gid": account.pw_gid, "groups": list(groups)}
        become = _AS_USER.format(umask=umask, **ids)
        process = Started(
            "-c", become + program, *words, cwd=self.folder, env=self.environment(user)
        )
        self.running.append(process)
        return process

    def run(
        self,
        user: str,
        program: str,
        *words: str | Path,
        umask: int = 0o077,
        groups: Sequence[int] = (GROUP,),
    ) -> str:
        """Run one to its end; gives what it printed."""
        process = self.start(user, program, *words, umask=umask, groups=groups)
        return process.communicate(timeout=TIMEOUT_S)[0]

    def qnnfarm(self, user: str, *words: str) -> str:
        """Run a command of ours as a user; gives what it printed."""
        return self.run(user, QNNFARM, *words)


@contextmanager
def shared_folder() -> Iterator[SharedFolder]:
    """Make a folder for the ledger of a group; skips where nobody can become two users."""
    needs("second-user")
    python = python_for_others()
    assert python is not None
    folder = Path(tempfile.mkdtemp(prefix="qnnfarm-shared-"))  # pytest's own lets nobody else in
    folder.chmod(0o755)
    made = SharedFolder(folder, folder / "ledger", python)
    made.ledger.mkdir()
    os.chown(made.ledger, 0, GROUP)
    made.ledger.chmod(0o2770)
    (folder / "pool.yaml").write_text("devices: [{type: local, name: bench}]\n")
    try:
        yield made
    finally:
        for process in made.running:
            process.kill()
            process.communicate()
        shutil.rmtree(folder)
