"""Libraries of a Maven artifact: those that an `.aar` or `.jar` has for each ABI.

Sources: Maven's "Repository Layout" (maven.apache.org/repositories/layout.html) and "About
Checksums" of its resolver; the contents of an AAR (developer.android.com/studio/projects/
android-library#aar-contents).
"""

import hashlib
import re
import shutil
import time
import zipfile
import zlib
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

from buildlib.paths import default_cache_root
from harness.errors import LibrariesFetchError, WrongUseError
from plugins.libraries.fetch import fetch_once

CENTRAL = "https://repo1.maven.org/maven2"
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}")
_PACKAGINGS = ("aar", "jar")
_CHECKSUMS = ("sha512", "sha256", "sha1")
_LIBRARY = re.compile(r"(?:jni|lib)/([A-Za-z0-9_-]{1,32})/([A-Za-z0-9_.+-]{1,128}\.so)")
_LICENSE = re.compile(r"(?:META-INF/)?((?:LICENSE|NOTICE)[A-Za-z0-9_.-]{0,32})", re.IGNORECASE)
_TIMEOUT_S = 60.0  # of a connection that says nothing
_WHOLE_S = 1800.0
_CHUNK = 1 << 20
_MOST_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Artifact:
    """An artifact of a repository, by its coordinates."""

    group: str
    name: str
    version: str

    @classmethod
    def parse(cls, text: str) -> "Artifact":
        """Read `GROUP:NAME:VERSION`."""
        words = text.split(":")
        if len(words) != 3 or not all(map(_WORD.fullmatch, words)) or ".." in text:
            example = "as com.qualcomm.qti:qnn-runtime:2.40.0"
            raise WrongUseError(f"--maven {text[:80]!r} is no GROUP:NAME:VERSION, {example}")
        return cls(*words)

    def __str__(self) -> str:
        return f"{self.group}:{self.name}:{self.version}"

    def url(self, repository: str, packaging: str) -> str:
        """Return where a repository keeps it."""
        folder = f"{self.group.replace('.', '/')}/{self.name}/{self.version}"
        return f"{repository.rstrip('/')}/{folder}/{self.name}-{self.version}.{packaging}"

    @property
    def folder(self) -> Path:
        """The folder in the cache for its libraries, `<ABI>/lib*.so`."""
        name = f"maven-{self.group}-{self.name}-{self.version}"
        return default_cache_root() / "libraries" / name


def fetch_artifact(artifact: Artifact, repository: str = CENTRAL) -> bool:
    """Download an artifact, and keep its libraries and licenses; False: they were there already.

    Args:
        repository: its URL, http or https.

    Raises:
        WrongUseError: the repository is no such URL.
        LibrariesFetchError: it is not there, differs from its checksum, or holds no library.
    """
    parts = urlsplit(repository)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise WrongUseError("--repository: give an http or https URL without a user's name")

    def fetch(downloads: Path, made: Path) -> None:
        archive = downloads / "artifact.zip"
        _check(_download(artifact, repository, archive), archive, artifact)
        _unpack(archive, made, artifact)

    return fetch_once(artifact.folder, fetch)


def _download(artifact: Artifact, repository: str, archive: Path) -> str:
    """Download the first packaging that the repository has; gives its URL."""
    for packaging in _PACKAGINGS:
        url = artifact.url(repository, packaging)
        if _get(url, archive, artifact, _MOST_BYTES):
            return url
    raise LibrariesFetchError(str(artifact), f"{repository} has neither an .aar nor a .jar of it")


def _get(url: str, path: Path, artifact: Artifact, most: int) -> bool:
    """Download a URL into a file; False if there is no such thing."""
    until = time.monotonic() + _WHOLE_S
    size = 0
    try:
        with urlopen(url, timeout=_TIMEOUT_S) as response, path.open("wb") as file:  # noqa: S310 - http alone
            while chunk := response.read(_CHUNK):
                size += len(chunk)
                if size > most or time.monotonic() > until:
                    reason = f"{url} is larger than {most} bytes, or takes over {_WHOLE_S:g} s"
                    raise LibrariesFetchError(str(artifact), reason)
                file.write(chunk)
            length = response.headers.get("Content-Length", str(size))
    except HTTPError as error:
        if error.code == 404:
            return False
        raise LibrariesFetchError(str(artifact), f"{url}: {error}") from error
    except (OSError, HTTPException) as error:  # URLError is an OSError
        raise LibrariesFetchError(str(artifact), f"{url}: {error}") from error
    if length != str(size):
        raise LibrariesFetchError(str(artifact), f"{url} ended after {size} of {length} bytes")
    return True


def _check(url: str, archive: Path, artifact: Artifact) -> None:
    """Compare a file with the strongest checksum that stands beside it in the repository."""
    for algorithm in _CHECKSUMS:
        beside = archive.with_suffix(f".{algorithm}")
        if not _get(f"{url}.{algorithm}", beside, artifact, 4096):
            continue
        with archive.open("rb") as file:
            digest = hashlib.file_digest(file, algorithm).hexdigest()
        words = beside.read_text(errors="replace").split() or [""]
        if words[0].lower() != digest:
            reason = f"its {algorithm} is {digest}, and {url}.{algorithm} says {words[0][:128]}"
            raise LibrariesFetchError(str(artifact), reason)
        return
    raise LibrariesFetchError(str(artifact), f"{url} has no checksum beside it")


def _unpack(archive: Path, folder: Path, artifact: Artifact) -> None:
    """Take the libraries of each ABI, and the licenses."""
    try:
        with zipfile.ZipFile(archive) as package:
            members = package.infolist()
            if sum(member.file_size for member in members) > _MOST_BYTES:
                reason = f"it unpacks to more than {_MOST_BYTES} bytes"
                raise LibrariesFetchError(str(artifact), reason)
            for member in members:
                if library := _LIBRARY.fullmatch(member.filename):
                    path = folder / library[1] / library[2]
                elif license_file := _LICENSE.fullmatch(member.filename):
                    path = folder / license_file[1]
                else:
                    continue
                path.parent.mkdir(exist_ok=True)
                with package.open(member) as source, path.open("wb") as target:
                    shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, OSError, RuntimeError, EOFError, zlib.error) as error:
        raise LibrariesFetchError(str(artifact), str(error)) from error
    if not any(folder.glob("*/*.so")):
        raise LibrariesFetchError(str(artifact), "it holds no libraries in jni/ABI or lib/ABI")
