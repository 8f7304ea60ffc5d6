"""Unpack Debian unstable's llama.cpp for virtual devices: `python3 -m tools.llama_cpp`.

`python3 -m tools.llama_cpp MODEL.gguf > llama.yaml` writes a description of a model with it, for
`--runtime llama.cpp`.

Debian's releases have none yet, and its programs need a newer C library than theirs. So they come
with the loader and the libraries of that, and nothing is installed: apt checks the signatures as
ever, in folders of its own. Standard library only.

The folder holds programs and libraries of llama.cpp, and `glibc/` what they need of the system,
which no other program must find: `LD_LIBRARY_PATH=glibc:.` in it starts them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER_VARIABLE = "QNNFARM_TEST_LLAMA_CPP"
"""Environment variable: a folder with a build of llama.cpp for x86_64 that the tests take."""
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
FOLDER = Path(os.environ.get(FOLDER_VARIABLE) or _CACHE / "qnnfarm-tests" / "llama.cpp")
"""The folder that the tests take the build from."""
PROGRAMS = ("llama-bench", "llama-completion", "llama-perplexity")
_PACKAGES = ("llama.cpp-tools", "llama.cpp-tools-extra")
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_INTERPRETER = b"/lib64/ld-linux-x86-64.so.2"
_OWN_INTERPRETER = b"./glibc/ld.so"


def is_here() -> bool:
    """Whether the folder has all programs."""
    return all((FOLDER / program).is_file() for program in PROGRAMS)


def unpack(target: Path) -> None:
    """Download the packages, and put the programs with what they load into a new folder.

    Raises:
        OSError: apt or dpkg is missing.
        subprocess.CalledProcessError: one of them failed.
    """
    with tempfile.TemporaryDirectory(prefix="qnnfarm-llama-") as scratch:
        root = Path(scratch) / "root"
        for package in _download(Path(scratch)):
            subprocess.run(["dpkg-deb", "--extract", package, root], check=True)  # noqa: S607
        libraries = root / "usr/lib/x86_64-linux-gnu"
        flat = Path(scratch) / "flat"
        (flat / "glibc").mkdir(parents=True)
        for backend in (libraries / "ggml/backends0").iterdir():
            shutil.copy(backend, flat)
        for program in PROGRAMS:
            binary = root / "usr/bin" / program
            for name, path in _needed(binary, (libraries, libraries / "llama")).items():
                own = name.startswith(("libllama", "libggml"))
                shutil.copy(path, (flat if own else flat / "glibc") / name)
            # The kernel looks for a relative loader where a program is started: in its run folder.
            interpreter = _OWN_INTERPRETER.ljust(len(_INTERPRETER), b"\0")
            (flat / program).write_bytes(binary.read_bytes().replace(_INTERPRETER, interpreter))
            (flat / program).chmod(0o755)
        shutil.copy(libraries / "ld-linux-x86-64.so.2", flat / "glibc/ld.so")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(flat, target)


def _download(scratch: Path) -> list[Path]:
    """Download the packages with all that they depend on, as for a system without any package."""
    for name in ("lists/partial", "cache/archives/partial"):
        (scratch / name).mkdir(parents=True)
    (scratch / "status").touch()
    source = f"deb [signed-by={_KEYRING}] {_mirror()} unstable main\n"
    (scratch / "sources.list").write_text(source, encoding="utf-8")
    options = {
        "Dir::Etc::SourceList": scratch / "sources.list",
        "Dir::Etc::SourceParts": "-",
        "Dir::State::Lists": scratch / "lists",
        "Dir::State::Status": scratch / "status",
        "Dir::Cache": scratch / "cache",
        "APT::Architecture": "amd64",
        "APT::Sandbox::User": "",
    }
    apt = ["apt-get", "-qq", *(f"--option={key}={value}" for key, value in options.items())]
    subprocess.run([*apt, "update"], check=True)
    install = ["install", "--download-only", "--no-install-recommends", "--yes", *_PACKAGES]
    subprocess.run([*apt, *install], check=True, stdout=subprocess.DEVNULL)
    return sorted((scratch / "cache/archives").glob("*.deb"))


def _mirror() -> str:
    """Return the mirror of Debian that this machine's apt uses."""
    command = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    match = re.search(r"^Debian (\S+/debian/?)$", listed, re.MULTILINE)
    if match is None:
        raise OSError("apt has no source of Debian's packages")
    return match[1]


def _needed(binary: Path, folders: Sequence[Path]) -> dict[str, Path]:
    """Return the libraries that the packages' own loader finds for a program, by their names."""
    command = [
        str(folders[0] / "ld-linux-x86-64.so.2"), "--library-path", ":".join(map(str, folders)),
        "--list", str(binary),
    ]  # fmt: skip
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"^\s*(\S+) => (\S+) \(", listed, re.MULTILINE)
    return {name: Path(path) for name, path in found if not name.startswith("/")}


def describe(model: str) -> dict[str, object]:
    """Return the description of a GGUF that runs by this build.

    plugins/other_runtimes/other-runtimes.md has its keys.
    """
    libraries = sorted((FOLDER / "glibc").glob("*"))
    return {
        "runtime": "llama.cpp",
        "model": model,
        "build": {"x86_64": str(FOLDER)},
        "threads": 1,
        "files": {f"glibc/{file.name}": str(file) for file in libraries},
        "environment": {"LD_LIBRARY_PATH": "glibc:."},
    }


def main() -> int:
    """Unpack it, unless it is here, and print its folder or the description of a model."""
    if not is_here():
        try:
            unpack(FOLDER)
        except OSError as error:
            return _refuse(str(error))
        except subprocess.CalledProcessError as error:
            return _refuse(f"{error.cmd[0]} ended with {error.returncode}")
    if not sys.argv[1:]:
        print(FOLDER)
    for key, value in describe(sys.argv[1]).items() if sys.argv[1:] else ():
        print(f"{key}: {json.dumps(value)}")  # JSON is YAML
    return 0


def _refuse(reason: str) -> int:
    print(f"llama.cpp cannot be had, so its tests skip: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
