"""What goes wrong between this host and one that is reached over SSH."""

import shlex

from harness.errors.base import HarnessError, one_line


class HostError(HarnessError):
    """Root of what goes wrong with a host over SSH.

    Attributes:
        host: as it was asked for.
    """

    def __init__(self, host: str, *details: object) -> None:
        super().__init__(host, *details)
        self.host = host


class HostConfigError(HostError):
    """`~/.ssh/config` says something about the host that cannot be used."""

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(host, reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the SSH configuration of host {one_line(self.host)}: {one_line(self.reason)}"


class HostUnreachableError(HostError):
    """The host does not answer, or answers no SSH."""

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(host, reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"host {one_line(self.host)} cannot be reached over SSH: {one_line(self.reason)}"


class HostKeyError(HostError):
    """The host's key is not known, so nobody can tell whether it is that host.

    Attributes:
        name: under which known_hosts files would know it.
        key_type: e.g. `ssh-ed25519`.
        fingerprint: of the key that it showed, e.g. `SHA256:...`.
        files: where its key was looked for.
    """

    def __init__(
        self, host: str, name: str, key_type: str, fingerprint: str, files: tuple[str, ...]
    ) -> None:
        super().__init__(host, name, key_type, fingerprint, files)
        self.name = name
        self.key_type = key_type
        self.fingerprint = fingerprint
        self.files = files

    def __str__(self) -> str:
        return (
            f"host {one_line(self.host)} shows the {one_line(self.key_type)} key "
            f"{one_line(self.fingerprint)}, and {one_line(', '.join(self.files))} has none for "
            f"{one_line(self.name)}: check the fingerprint, then accept it with `ssh` once"
        )


class HostKeyChangedError(HostKeyError):
    """The host shows another key than the known one: another machine, or somebody in between."""

    def __str__(self) -> str:
        return (
            f"host {one_line(self.host)} shows the {one_line(self.key_type)} key "
            f"{one_line(self.fingerprint)}, which is NOT the one that "
            f"{one_line(', '.join(self.files))} has for {one_line(self.name)}: somebody may be in "
            f"between; if the host was set up anew, `ssh-keygen -R "
            f"{shlex.quote(one_line(self.name))}` forgets its old key"
        )


class HostAuthError(HostError):
    """The host accepts none of the user's keys."""

    def __init__(self, host: str, user: str, reason: str) -> None:
        super().__init__(host, user, reason)
        self.user = user
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"host {one_line(self.host)} does not let {one_line(self.user)} in: "
            f"{one_line(self.reason)}"
        )
