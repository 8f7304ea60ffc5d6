"""Each workload on a real virtual device: what it gives, and what it stores."""

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from buildlib.container.genie_decoding import Lade
from buildlib.errors import BuildError
from harness.devices.device import Device
from harness.errors import DeviceCommandError, OutputCheckError, PromptTooLongError, WrongUseError
from harness.results.identity import Subject
from harness.results.llama_bench import list_tests
from harness.results.store import ResultsStore
from harness.runtimes.genie.output import parse_profile
from harness.runtimes.registry import open_model
from harness.workloads.base import Recording
from harness.workloads.bench import Bench
from harness.workloads.command import Command
from harness.workloads.dialog import Dialog
from harness.workloads.generate import Generate
from harness.workloads.perplexity import Perplexity
from harness.workloads.registry import AnyWorkload
from harness.workloads.session import Session, SessionOptions
from suites.models import tiny_llama
from tests.optional import needs_no_transformers, needs_transformers

TEXT = "In the beginning God created the heaven and the earth. " * 60
GROUP = "a" * 32
TALK = (("In the beginning", "And God said"), ("Moses",))


@pytest.fixture(scope="module")
def session(
    virtual_device: Device, small_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Session]:
    options = SessionOptions(folder=tmp_path_factory.mktemp("texts"))
    (options.folder / "text.txt").write_text(TEXT)
    with Session(virtual_device, open_model(small_bundle), options) as opened:
        yield opened


@pytest.mark.parametrize(
    ("workload", "kind", "metric"),
    [
        (Bench(prompt_tokens=4, new_tokens=2, repetitions=1, warmup=0), "bench", "ttft_s"),
        (Perplexity(text="text.txt", windows=1), "perplexity", "perplexity"),
        (Generate(prompt="In the beginning", max_tokens=4), "generate", "ttft_s"),
        (Dialog(dialogs=TALK, max_tokens=3), "generate", "peak_anonymous_bytes"),
    ],
    ids=lambda value: value.kind if hasattr(value, "kind") else "",
)
def test_a_workload_gives_its_values_and_stores_its_run(
    session: Session, store: ResultsStore, workload: AnyWorkload, kind: str, metric: str
) -> None:
    recording = Recording(
        lambda: store, GROUP, session=2, label="x", labels={"team": "camera"}, plan="nightly"
    )
    result = workload.run(session, recording)
    (run,) = store.list_runs()
    assert result.run == run
    assert (run.kind, run.status, run.group_id, run.session, run.label) == (
        kind, "done", GROUP, 2, "x",
    )  # fmt: skip
    assert run.values(metric) == pytest.approx((result.values[metric],))
    assert result.summary
    assert (run.labels, run.plan, run.origin) == ({"team": "camera"}, "nightly", None)
    assert run.concurrent_sessions is not None
    assert run.workload.runner_sha256 == session.runtime.sha256_of(run.workload.runner)
    assert run.container.size_bytes == session.container.metadata.size_bytes
    device = run.device
    assert None not in {device.ram_bytes, device.os_build, device.build_fingerprint}


@needs_transformers
def test_a_run_knows_which_transformers_computed_its_reference(
    session: Session, store: ResultsStore
) -> None:
    fields = {"text": "text.txt", "windows": 1, "reference": str(tiny_llama.folder())}
    ours = Perplexity.of(**fields).run(session, Recording(lambda: store)).run
    theirs = Perplexity.of(**fields, reference_with="transformers")
    theirs.check(session.model)
    other = theirs.run(session, Recording(lambda: store)).run
    assert ours is not None
    assert other is not None
    assert other.values("perplexity_float") == pytest.approx(
        ours.values("perplexity_float"), rel=1e-5
    )
    known = other.provenance.library_versions
    assert known["transformers"] == version("transformers")
    assert known.keys() - ours.provenance.library_versions.keys() == {"torch", "transformers"}
    assert Subject.of(ours) == Subject.of(other)


@needs_no_transformers
def test_a_reference_of_transformers_needs_it_before_a_device(small_bundle: Path) -> None:
    asked = Perplexity.of(text="a", reference="b", reference_with="transformers")
    with pytest.raises(BuildError, match=r"pip install 'qnnfarm\[reference\]'"):
        asked.check(open_model(small_bundle))


def test_profiles_and_log_are_kept_with_a_run(session: Session, store: ResultsStore) -> None:
    bench = Bench(prompt_tokens=4, new_tokens=2, repetitions=1, warmup=1)
    run = bench.run(session, Recording(lambda: store)).output
    kept = {artifact.name: artifact for artifact in store.artifacts(run.id)}
    profiles = store.read_artifact(kept["profiles.jsonl"]).splitlines()
    assert [parse_profile(line.decode(), "") for line in profiles] != []
    assert len(profiles) == 2
    assert set(kept) <= {"profiles.jsonl", "run.log"}


def test_a_prompt_at_a_depth_is_a_second_query(session: Session, store: ResultsStore) -> None:
    bench = Bench(prompt_tokens=8, depth_tokens=16, new_tokens=1, repetitions=1, warmup=0)
    run = bench.run(session, Recording(lambda: store)).output
    assert Subject.of(run).label == "pp8 @ d16"
    assert run.values("prompt_tokens") == (8.0,)
    (test,) = list_tests([run])
    assert test.name == "pp8 @ d16"
    (profile,) = (one for one in store.artifacts(run.id) if one.kind == "profile")
    events = json.loads(store.read_artifact(profile))["components"][0]["events"]
    queries = [event for event in events if event["type"] == "GenieDialog_query"]
    taken = [event["num-prompt-tokens"]["value"] for event in queries]
    assert taken == [16, 8]


def test_a_depth_counts_against_the_context(session: Session) -> None:
    Bench(prompt_tokens=32, depth_tokens=128, new_tokens=1).check(session.model)
    with pytest.raises(PromptTooLongError):
        Bench(prompt_tokens=34, depth_tokens=128, new_tokens=1).check(session.model)
    with pytest.raises(WrongUseError, match=r"`prompt_tokens`: after a depth, .* 3 or more"):
        Bench.of(prompt_tokens=2, depth_tokens=128)


def test_a_dialog_that_takes_one_prompt_has_no_depth(session: Session, tmp_path: Path) -> None:
    config = tmp_path / "speculates.json"
    plain = session.container.genie_config
    speculates = plain.with_type("lade", lade=Lade(window=4, ngram=3, gcap=4))
    config.write_text(speculates.to_json())
    bench = Bench.of(prompt_tokens=8, depth_tokens=16, genie_config=str(config))
    with pytest.raises(WrongUseError, match="depth_tokens: a dialog of type lade answers one"):
        bench.run(session)


def test_a_wrong_answer_fails_its_run_which_keeps_its_log(
    session: Session, store: ResultsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session.runtime, "read_log", lambda: "what went wrong")
    with pytest.raises(OutputCheckError, match="Klaatu"):
        Generate(prompt="Moses", max_tokens=2, expect="Klaatu").run(
            session, Recording(lambda: store)
        )
    (run,) = store.list_runs()
    assert (run.status, run.check.outcome, run.values("ttft_s")) == ("failed", "failed", ())
    kept = {artifact.name: artifact for artifact in store.artifacts(run.id)}
    assert kept.keys() >= {"run.log", "dmesg.txt", "profiles.jsonl"}
    assert (kept["run.log"].kind, kept["dmesg.txt"].kind) == ("log", "log")
    assert store.read_artifact(kept["run.log"]) == b"what went wrong"


def test_an_unrecorded_workload_leaves_no_run(session: Session, store: ResultsStore) -> None:
    result = Dialog(dialogs=TALK, max_tokens=3).run(session)
    assert [len(answers) for answers in result.output.answers] == [2, 1]
    assert result.run is None
    assert store.list_runs() == ()


def test_a_command_needs_no_container_and_no_store(virtual_device: Device) -> None:
    with Session(virtual_device) as session:
        result = Command(command=("echo", "$HOME; it's\n\nlast")).run(session)
        assert (result.output, result.summary) == ("$HOME; it's\n\nlast\n", "last")
        with pytest.raises(DeviceCommandError):
            Command(command=("false",)).run(session)
        with pytest.raises(ValueError, match="no model"):
            Generate(prompt="x").run(session)


@pytest.mark.parametrize(
    "workload",
    [
        Bench(prompt_tokens=500),
        Bench(prompt_tokens=100, new_tokens=100),
        Generate(prompt="x", max_tokens=192),
        Dialog(dialogs=TALK, max_tokens=192),
    ],
    ids=lambda workload: workload.kind,
)
def test_a_container_of_too_short_a_context_is_refused(
    small_bundle: Path, workload: AnyWorkload
) -> None:
    with pytest.raises(PromptTooLongError) as caught:
        workload.check(open_model(small_bundle))
    assert "\n" not in str(caught.value)
