"""Models of the Hugging Face hub, from a server that answers as the hub does."""

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from harness.devices.device import Device
from suites.models import tiny_llama
from tests.command_line import qnnfarm

pytestmark = pytest.mark.needs("libatomic1")

COMMIT = hashlib.sha1(b"a commit", usedforsecurity=False).hexdigest()
NAMES = ("config.json", "tokenizer.json", "model.safetensors", "README.md", "text/calibration.txt")


class Hub(BaseHTTPRequestHandler):
    """`org/llama` with a few files of a folder, at one commit."""

    folder: Path

    asked: list[str] = []  # noqa: RUF012  (one server a test)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        head = f"/org/llama/resolve/{COMMIT}/"
        if path.startswith("/api/models/org/llama/revision/"):
            files = [{"rfilename": name} for name in NAMES]
            data = json.dumps({"id": "org/llama", "sha": COMMIT, "siblings": files}).encode()
        elif path.startswith("/api/models/org/llama/tree/"):
            data = json.dumps([self._entry(name) for name in NAMES]).encode()
        elif path.startswith(head) and (name := path.removeprefix(head)) in NAMES:
            data = (self.folder / name).read_bytes()
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _entry(self, name: str) -> dict[str, object]:
        data = (self.folder / name).read_bytes()
        oid = hashlib.sha1(data, usedforsecurity=False).hexdigest()
        return {"type": "file", "path": name, "size": len(data), "oid": oid}


@pytest.fixture
def hub(short_model: Path) -> Iterator[str]:
    """The address of a hub; what it was asked for is in `Hub.asked`."""
    Hub.asked.clear()
    Hub.folder = short_model
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def environment(hub: str, tmp_path: Path) -> dict[str, str]:
    """Of commands that ask that hub, and keep its models in a folder of their own."""
    return os.environ | {
        "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip


def test_a_model_of_the_hub_is_downloaded_once(environment: dict[str, str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "cache_dir: cache\ngenerator_config: {sequence_length: 8, context_length: 48}\n"
        "stages: {model_loader: {hf_pretrained_kwargs: {revision: main}}}\n"
    )

    def run(model: str) -> tuple[int, str]:
        done = qnnfarm("pipeline", "run", recipe, "--model", model, "--json", env=environment)
        return done.returncode, done.stdout or done.stderr

    code, told = run("org/llama")
    assert code == 0, told
    assert json.loads(told)["model"] == "llama"
    files = {path.rpartition(f"{COMMIT}/")[2] for path in Hub.asked if COMMIT in path}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= files
    assert "README.md" not in files
    Hub.asked.clear()
    assert run("org/llama")[0] == 0
    assert not [path for path in Hub.asked if "safetensors" in path]
    code, told = run("org/none")
    assert code == 2
    assert told.count("\n") == 1
    assert "org/none: there is no such folder, and the Hugging Face hub did not give it" in told


@pytest.mark.variant
def test_a_build_and_its_references_are_of_one_model_of_the_hub(
    environment: dict[str, str], tmp_path: Path, virtual_device: Device
) -> None:
    out, model = tmp_path / "out", "org/llama@main"
    shape = ("--target", "SM8750:emulator", "--ar", "1,8", "--cl", "48")
    done = qnnfarm("build", model, *shape, "--out", out, env=environment)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((out / "metadata.json").read_text())
    assert manifest["model"]["name"] == "llama"
    assert manifest["model"]["origin"] == f"org/llama@{COMMIT}"
    for command in ("bench", "debug tensor"):
        done = qnnfarm(*command.split(), out, "--reference", "org/none", env=environment)
        assert done.returncode == 2
        assert "cannot use model org/none: there is no such folder, and the" in done.stderr
    text = ("--text", tiny_llama.folder() / "text" / "heldout.txt", "--windows", "1")
    where = ("--device", virtual_device.serial, "--json")
    done = qnnfarm("perplexity", out, *text, *where, "--reference", model, env=environment)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert values["perplexity_float"] == pytest.approx(values["perplexity"], rel=0.02)
