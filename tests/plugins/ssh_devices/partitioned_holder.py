"""A holder behind cables: leases the board and runs commands there, as it is told on stdin.

    partitioned_holder.py LEDGER SSH_CONFIG

Each line is `lease`, `release` or a command; each answer is a line: the token or the output, or the
name of the error's class.
"""

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from harness.devices.devices import Devices
from harness.devices.spec import DeviceSpec
from harness.errors import HarnessError
from harness.pool.config import parse_config
from harness.pool.members import Member
from harness.pool.opener import Opener
from harness.pool.pool import Pool
from harness.pool.requirement import Requirement

if TYPE_CHECKING:
    from harness.pool.lease import Lease

CONFIG = "{lease: {ttl_s: 3}, recovery: {steps: [reconnect], backoff_s: 1, return_timeout_s: 1}}"
COMMAND_S = 20.0


def open_pool(ledger: str, ssh_config: Path) -> Pool:
    """Open a pool of the board alone."""
    config = parse_config(CONFIG)
    opener = Opener(config, Devices(ssh_config=ssh_config))
    return Pool([Member("board", DeviceSpec("linux", "board"))], config, opener, ledger=ledger)


def main() -> None:
    """Do as stdin says."""
    lease: Lease | None = None
    with open_pool(sys.argv[1], Path(sys.argv[2])) as pool:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for line in sys.stdin:
            try:
                if line == "lease\n":
                    lease = pool.acquire(Requirement(), timeout_s=60)
                    answer = str(lease.token)
                elif line == "release\n":
                    assert lease is not None
                    with suppress(HarnessError):
                        lease.release()
                    answer = "released"
                else:
                    assert lease is not None
                    result = lease.device.shell(line, timeout_s=COMMAND_S)
                    answer = result.stdout.strip()
            except HarnessError as error:
                if lease is not None:
                    with suppress(HarnessError):
                        lease.report(error)
                answer = type(error).__name__
            sys.stdout.write(f"{answer}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
