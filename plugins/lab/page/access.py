"""Access to the page: anybody who reaches it reads; signed in, or named by a proxy, one acts."""

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from reports.errors import ReportError

COOKIE = "qnnfarm_session"
_LINE = re.compile(r"([A-Za-z0-9._@-]{1,64})\s+(\S{16,256})")
_USER = re.compile(r"[A-Za-z0-9._@+-]{1,128}")
_OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MOST_SESSIONS = 1000


class Access:
    """Users who may act.

    Args:
        tokens: users by the SHA-256 of their token.
        proxy_header: the header in which a reverse proxy names the user; empty for none. Whoever
            can connect can send it, so it is for a socket that only the proxy may open.
    """

    def __init__(self, tokens: Mapping[bytes, str] | None = None, proxy_header: str = "") -> None:
        self._tokens = dict(tokens or {})
        self._proxy_header = proxy_header
        self._sessions: dict[str, str] = {}

    @property
    def signs_in(self) -> bool:
        """True if a token can be given."""
        return bool(self._tokens)

    def sign_in(self, token: str) -> str | None:
        """Begin a session of the token's user, and return its secret; `None` for a wrong token."""
        user = self._tokens.get(_digest(token))
        if user is None:
            return None
        if len(self._sessions) >= _MOST_SESSIONS:
            self._sessions.pop(next(iter(self._sessions)))
        session = secrets.token_urlsafe(32)
        self._sessions[session] = user
        return session

    def user(self, connection: HTTPConnection) -> str:
        """Return the user of a request; empty if it may not act."""
        if self._proxy_header:
            name = connection.headers.get(self._proxy_header, "")
            return name if _USER.fullmatch(name) else ""
        scheme, _, token = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self._tokens.get(_digest(token.strip()), "")
        return self._sessions.get(connection.cookies.get(COOKIE, ""), "")


def is_same_origin(connection: HTTPConnection) -> bool:
    """Return whether no other site's page can have made a browser send this request.

    The rule is that of Go's `http.CrossOriginProtection`: browsers say `Sec-Fetch-Site`, older ones
    `Origin`; what says neither is no browser.
    """
    site = connection.headers.get("sec-fetch-site")
    if site is not None:
        return site in {"same-origin", "none"}
    origin = connection.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == connection.headers.get("host")


def read_tokens(path: Path) -> Mapping[bytes, str]:
    """Read a file of users and their tokens, `USER TOKEN` a line.

    Raises:
        ReportError: it cannot be read, others may read it, or a line is wrong.
    """
    try:
        with path.open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & _OPEN_TO_OTHERS:
                raise ReportError(f"{path}: others may read it: chmod 600 {path}")
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ReportError(f"{path}: {reason or str(error)}") from error
    tokens = {}
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            reason = f"line {number} is not `USER TOKEN` with a token of 16 characters or more"
            raise ReportError(f"{path}: {reason}")
        tokens[_digest(match[2])] = match[1]
    if not tokens:
        raise ReportError(f"{path}: it names no user: write a line `USER TOKEN`")
    return tokens


def _digest(token: str) -> bytes:
    """Return a digest to look a token up by, so that the time of it tells nothing."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
