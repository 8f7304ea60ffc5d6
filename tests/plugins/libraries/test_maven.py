"""Libraries of Maven artifacts, from a real HTTP server in the layout of a Maven repository."""

import hashlib
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib.targets import find_soc
from harness.errors import LibrariesFetchError, WrongUseError
from harness.runtimes.bundles.sources import FOLDERS_VARIABLE, find_qnn, qnn_libraries
from plugins.libraries.maven import Artifact, fetch_artifact

RUNTIME = Artifact("com.example.npu", "runtime", "2.51.0")
PHONE = find_soc("SM8750")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the artifact in a repository."""
    monkeypatch.setenv("QNNFARM_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "maven2" / "com/example/npu/runtime/2.51.0"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def repository(tmp_path: Path, root: Path) -> Iterator[str]:
    class Silent(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's
            pass

    with serving(partial(Silent, directory=str(tmp_path / "maven2"))) as url:
        yield url


@contextmanager
def serving(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def publish(root: Path, *members: str, packaging: str = "aar", checksum: str = "sha1") -> Path:
    archive = root / f"runtime-2.51.0.{packaging}"
    with zipfile.ZipFile(archive, "w") as package:
        for member in members:
            package.writestr(member, member)
    digest = hashlib.new(checksum, archive.read_bytes()).hexdigest()
    archive.with_name(f"{archive.name}.{checksum}").write_text(f"{digest}  {archive.name}\n")
    return archive


def fetched(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))


@pytest.mark.parametrize(
    ("packaging", "top", "checksum"),
    [("aar", "jni", "sha1"), ("jar", "lib", "sha256"), ("aar", "jni", "sha512")],
)
def test_the_libraries_of_an_artifact_are_a_source(
    root: Path, repository: str, packaging: str, top: str, checksum: str
) -> None:
    names = qnn_libraries("arm64-v8a", PHONE)
    members = [f"{top}/arm64-v8a/{name}" for name in names]
    members += ["META-INF/LICENSE.txt", "classes.jar", f"{top}/x86_64/deeper/libX.so"]
    members += [f"../{top}/x86_64/libX.so", f"{top}/../libX.so", f"/{top}/x86_64/libX.so"]
    publish(root, *members, packaging=packaging, checksum=checksum)
    assert fetch_artifact(RUNTIME, repository)
    libraries = [f"arm64-v8a/{name}" for name in names]
    assert fetched(RUNTIME.folder) == sorted(["LICENSE.txt", *libraries])
    bundle = find_qnn("arm64-v8a", PHONE, {FOLDERS_VARIABLE: str(RUNTIME.folder)})
    assert set(bundle.files) == set(names)
    assert not fetch_artifact(RUNTIME, "http://127.0.0.1:9")  # it is there


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda archive: archive.unlink(), "neither an .aar nor a .jar"),
        (lambda archive: archive.with_name(f"{archive.name}.sha1").unlink(), "has no checksum"),
        (lambda archive: archive.write_bytes(b"other"), "its sha1 is"),
        (lambda archive: archive.with_name(f"{archive.name}.sha1").write_text(""), "its sha1 is"),
    ],
)
def test_what_is_not_as_published_leaves_nothing(
    root: Path, repository: str, damage: Callable[[Path], object], says: str
) -> None:
    archive = publish(root, "jni/arm64-v8a/libX.so")
    damage(archive)
    with pytest.raises(LibrariesFetchError, match=says):
        fetch_artifact(RUNTIME, repository)
    assert not RUNTIME.folder.exists()


def test_archives_without_libraries_and_files_that_are_none(root: Path, repository: str) -> None:
    publish(root, "classes.jar")
    with pytest.raises(LibrariesFetchError, match="holds no libraries"):
        fetch_artifact(RUNTIME, repository)
    archive = root / "runtime-2.51.0.aar"
    archive.write_bytes(b"no zip")
    digest = hashlib.sha1(b"no zip", usedforsecurity=False).hexdigest()
    (root / f"{archive.name}.sha1").write_text(digest)
    with pytest.raises(LibrariesFetchError, match="not a zip file"):
        fetch_artifact(RUNTIME, repository)


def test_a_transfer_that_is_cut_off(root: Path) -> None:
    class CutOff(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"PK")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's
            pass

    with serving(CutOff) as url, pytest.raises(LibrariesFetchError, match="after 2 of 100 bytes"):
        fetch_artifact(RUNTIME, url)


def test_a_repository_that_cannot_be_reached(root: Path) -> None:
    with pytest.raises(LibrariesFetchError, match="refused"):
        fetch_artifact(RUNTIME, "http://127.0.0.1:9")


@pytest.mark.parametrize("url", ["file:///etc", "ftp://x/y", "https://me:secret@x/", "x", "http:"])
def test_other_urls_are_refused(root: Path, url: str) -> None:
    with pytest.raises(WrongUseError, match="--repository") as caught:
        fetch_artifact(RUNTIME, url)
    assert "secret" not in str(caught.value)


@given(st.text(alphabet="a.:/\\-_ 0é\n", max_size=20))
def test_coordinates_stay_in_the_repository_and_the_cache(text: str) -> None:
    try:
        artifact = Artifact.parse(text)
    except WrongUseError:
        return
    url = artifact.url("http://x", "aar")
    assert url.startswith("http://x/")
    assert not {"", ".", ".."} & set(url.removeprefix("http://x/").split("/")[-3:])
    assert artifact.folder.parent.name == "libraries"
