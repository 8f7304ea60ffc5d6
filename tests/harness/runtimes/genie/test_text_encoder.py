"""What a runner of text encoders leaves on a device becomes vectors, or an error in one line."""

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from buildlib.container.text_embedding import EncoderContext, text_embedding
from harness.errors import RuntimeOutputError
from harness.runtimes.genie.text_encoder import EncoderRun

if TYPE_CHECKING:
    from harness.devices.device import Device
    from harness.runtimes.run_folder import RunFolder

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


class Folder:
    """A run folder in which a runner left these files."""

    def __init__(self, files: Mapping[str, str], output: bytes) -> None:
        self.files, self.output = dict(files), output
        self.sent: dict[str, str] = {}
        self.commands: list[list[str]] = []

    def send(self, inputs: Mapping[str, str]) -> None:
        self.sent |= inputs

    def run(self, command: Sequence[str], **_: object) -> SimpleNamespace:
        self.commands.append(list(command))
        return SimpleNamespace(memory={"peak_rss_bytes": 1.0})

    def read(self, name: str) -> str:
        return self.files[name]

    def pull(self, _name: str) -> bytes:
        return self.output


def encoder(
    runner: str, files: Mapping[str, str], output: bytes = ROWS.tobytes()
) -> tuple[EncoderRun, Folder]:
    folder = Folder(files, output)
    device = SimpleNamespace(serial="phone")
    run = EncoderRun(cast("Device", device), cast("RunFolder", folder), runner, lambda n: 60.0 * n)
    return run, folder


def summary(*shapes: tuple[int, ...]) -> str:
    embeddings = [{"shape": shape, "seconds": 0.5} for shape in shapes]
    return json.dumps({"format": 1, "init_s": 0.25, "embeddings": embeddings})


def test_texts_go_through_one_process_of_our_runner() -> None:
    files = {"summary.json": summary((1, 2), (1, 2)), "profile.json": PROFILE}
    run, folder = encoder("genie_t2e_run.py", files)
    result = run.embed(["a", "\N{SNOWMAN}"], CONFIG)
    assert [vectors.array().tolist() for vectors in result.vectors] == [[[1, 2]], [[3, 4]]]
    assert result.metrics == {"init_s": 0.25, "peak_rss_bytes": 1.0}
    assert json.loads(folder.sent["prompts.json"]) == ["a", "\N{SNOWMAN}"]
    assert len(folder.commands) == 1


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
