"""What a runner of text encoders leaves on a device becomes vectors, or an error in one line."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from buildlib.container.text_embedding import EncoderContext
from harness.errors import RunnerError, RuntimeOutputError
from plugins.encoders.stages import text_embedding
from plugins.encoders.text_encoder import EncoderRun, OnVectors

if TYPE_CHECKING:
    from harness.devices.device import Device
    from harness.runtimes.deployed import RunFolder

CONFIG = text_embedding(
    EncoderContext(n_vocab=10, ctx_size=8, embed_size=2, pad_token=0),
    ["encoder.bin"],
    ("", ""),
    emulator=True,
)
ROWS = np.array([[1, 2], [3, 4]], np.float32)
PROFILE = json.dumps(
    {
        "components": [
            {
                "events": [
                    {"type": "GenieEmbedding_create", "duration": 250_000},
                    {"type": "GenieEmbedding_generate", "duration": 500_000},
                ]
            }
        ]
    }
)


@dataclass
class Folder:
    """A run folder in which a runner leaves these files, and others may have left theirs."""

    leaves: Mapping[str, str]
    output: bytes
    fails: bool = False
    on_running: Callable[[float, str], None] | None = None
    files: dict[str, str] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)

    def send(self, inputs: Mapping[str, str]) -> None:
        self.files |= inputs

    def run(self, command: Sequence[str], **_: object) -> SimpleNamespace:
        self.commands.append(list(command))
        self.files |= self.leaves
        if self.on_running is not None:
            self.on_running(10.0, "text 2/2")
        if self.fails:
            raise RunnerError("phone", "genie_t2e_run.py", "was killed", 137, "")
        return SimpleNamespace(memory={"peak_rss_bytes": 1.0})

    def read(self, name: str) -> str:
        return self.files[name]

    def pull(self, _name: str, most: int) -> bytes:
        assert most >= len(self.output)
        return self.output


def encoder(
    runner: str,
    leaves: Mapping[str, str],
    output: bytes = ROWS.tobytes(),
    *,
    fails: bool = False,
    on_vectors: OnVectors | None = None,
) -> tuple[EncoderRun, Folder]:
    folder = Folder(leaves, output, fails)
    run = EncoderRun(
        cast("Device", SimpleNamespace(serial="phone")),
        cast("RunFolder", folder),
        runner,
        lambda n: 60.0 * n,
        on_vectors=on_vectors,
    )
    return run, folder


def summary(*shapes: tuple[int, ...]) -> str:
    lines: list[object] = [{"format": 2, "init_s": 0.25}]
    lines += [{"shape": shape, "seconds": 0.5} for shape in shapes]
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_texts_go_through_one_process_of_our_runner() -> None:
    files = {"summary.json": summary((1, 2), (1, 2)), "profile.json": PROFILE}
    run, folder = encoder("genie_t2e_run.py", files)
    result = run.embed(["a", "\N{SNOWMAN}"], CONFIG)
    assert [vectors.array().tolist() for vectors in result.vectors] == [[[1, 2]], [[3, 4]]]
    assert result.metrics == {"init_s": 0.25, "peak_rss_bytes": 1.0}
    assert json.loads(folder.files["prompts.json"]) == ["a", "\N{SNOWMAN}"]
    assert len(folder.commands) == 1


def test_what_an_unfinished_process_has_written_is_handed_out() -> None:
    told: list[list[list[list[float]]]] = []
    cut = summary((1, 2), (1, 2))[:-9]
    run, _ = encoder(
        "genie_t2e_run.py",
        {"summary.json": cut},
        ROWS.tobytes()[:12],
        fails=True,
        on_vectors=lambda vectors: told.append([each.array().tolist() for each in vectors]),
    )
    with pytest.raises(RunnerError):
        run.embed(["a", "b"], CONFIG)
    assert told == [[[[1, 2]]]] * 2


def test_what_an_earlier_process_wrote_into_the_folder_is_not_handed_out() -> None:
    told: list[Sequence[object]] = []
    run, folder = encoder("genie_t2e_run.py", {}, fails=True, on_vectors=told.append)
    folder.files["summary.json"] = summary((1, 2), (1, 2))
    with pytest.raises(RunnerError):
        run.embed(["a", "b"], CONFIG)
    assert told == []


def test_the_vendors_program_takes_one_text_a_process() -> None:
    run, folder = encoder("genie-t2e-run", {"profile.json": PROFILE})
    result = run.embed(["a", "b"], CONFIG)
    assert [vectors.shape for vectors in result.vectors] == [(2, 2), (2, 2)]
    assert [vectors.seconds for vectors in result.vectors] == [0.5, 0.5]
    assert result.metrics["init_s"] == 0.25
    flags = ["-c", "query_config.json", "--output_file", "output.raw", "--profile", "profile.json"]
    assert folder.commands == [["./genie-t2e-run", *flags, "--prompt_file", "prompt.txt"]] * 2


@pytest.mark.parametrize(
    ("left", "output", "reason"),
    [
        ("", ROWS.tobytes(), "unreadable summary"),
        (summary().replace("2", "1"), ROWS.tobytes(), "unreadable summary"),
        (summary((1, 2)), ROWS.tobytes(), "1 embeddings of 2 texts"),
        (summary((1, 2), (0, 2)), ROWS.tobytes(), "unreadable summary"),
        (summary((1, 2), (1, 2)), b"short", "5 bytes of embeddings, not 16"),
    ],
)
def test_other_results_of_our_runner_are_refused(left: str, output: bytes, reason: str) -> None:
    run, _ = encoder("genie_t2e_run.py", {"summary.json": left, "profile.json": PROFILE}, output)
    with pytest.raises(RuntimeOutputError, match=reason):
        run.embed(["a", "b"], CONFIG)


@pytest.mark.parametrize(
    ("profile", "output", "reason"),
    [
        ("{", ROWS.tobytes(), "unreadable Genie profile"),
        ('{"components": []}', ROWS.tobytes(), "unreadable Genie profile"),
        (PROFILE.replace("500000", "-1"), ROWS.tobytes(), "impossible times"),
        (PROFILE, b"odd", "3 bytes, no rows of 2 values"),
        (PROFILE, b"", "0 bytes, no rows of 2 values"),
    ],
)
def test_other_results_of_the_vendors_program_are_refused(
    profile: str, output: bytes, reason: str
) -> None:
    run, _ = encoder("genie-t2e-run", {"profile.json": profile}, output)
    with pytest.raises(RuntimeOutputError, match=reason):
        run.embed(["a"], CONFIG)
