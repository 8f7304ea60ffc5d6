"""How dialogs are run, with the real Genie on a virtual device; the tests share two containers."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buildlib.builder.stages.package import proposed_sampler
from buildlib.checkpoint.generation import GenerationConfig
from buildlib.container.container import GenAIContainer
from buildlib.container.genie_decoding import Lade
from buildlib.container.manifest import CLIPPED_ADAPTERS
from buildlib.errors import ModelWarning
from harness.devices.device import Device
from harness.errors import HostFileError, PromptTooLongError, WrongUseError
from harness.runtimes.base import Generates, GenerationRequest
from harness.runtimes.dialog_settings import DialogSettings
from harness.runtimes.genie import runtime
from harness.runtimes.genie.runtime import GenieModel
from harness.workloads.dialog import Dialog
from harness.workloads.generate import Generate
from harness.workloads.session import Session, SessionOptions

TOKENS = (5, 6, 7, 8, 9)
TEXT = "".join(chr(0x100 + token) for token in TOKENS)
MORE = chr(0x100 + 40) + chr(0x100 + 50)
Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def session(virtual_device: Device, dialog_container: GenAIContainer) -> Iterator[Session]:
    with Session(virtual_device, GenieModel(dialog_container)) as opened:
        yield opened


def ids(session: Session, tokens: tuple[int, ...] = TOKENS, **fields: object) -> tuple[int, ...]:
    """The answer to token ids."""
    result = Generate.of(tokens=tokens, **{"max_tokens": 8, **fields}).run(session).output
    assert result.token_ids is not None
    return result.token_ids


def talk(session: Session, *turns: str, **fields: object) -> tuple[str, ...]:
    """The answers of a conversation in one process."""
    workload = Generate.of(prompt=turns, **{"max_tokens": 4, **fields})
    return workload.run(session).output.answers


@pytest.fixture
def changed(dialog_container: GenAIContainer, tmp_path: Path) -> Callable[[Edit], str]:
    """Writes another `genie_config.json` for the container."""

    def write(edit: Edit) -> str:
        document = json.loads(dialog_container.genie_config.to_json())
        edit(document["dialog"])
        (tmp_path / "other.json").write_text(json.dumps(document))
        return str(tmp_path / "other.json")

    return write


@pytest.fixture(scope="module")
def greedy(session: Session) -> tuple[int, ...]:
    return ids(session, max_tokens=24)


def test_the_proposed_sampler_runs_and_measurements_stay_greedy(
    session: Session,
    changed: Callable[[Edit], str],
    greedy: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published = GenerationConfig(do_sample=True, temperature=1.5, repetition_penalty=1.3)
    sampler = proposed_sampler(published, session.container.genie_config.dialog.context.size)
    block = json.loads(sampler.model_dump_json(by_alias=True, exclude_none=True))
    config = changed(lambda dialog: dialog.update(sampler=block))
    assert ids(session, genie_config=config) == greedy[:8]
    monkeypatch.setattr("harness.runtimes.genie.runtime._sampler_of", lambda _: sampler)
    sampled = ids(session, genie_config=config)  # as by a program that opens the dialog itself
    assert sampled == ids(session, genie_config=config) != greedy[:8]


def test_another_kv_dim_than_the_graphs_is_told(
    session: Session, changed: Callable[[Edit], str], greedy: tuple[int, ...]
) -> None:
    config = changed(lambda dialog: dialog["engine"]["backend"]["QnnHtp"].update({"kv-dim": 64}))
    with pytest.warns(ModelWarning, match="kv-dim is 64, and the heads of the graphs have 12"):
        assert ids(session, genie_config=config) == greedy[:8]


def test_every_graph_goes_on_alike(
    virtual_device: Device, graphs_container: GenAIContainer
) -> None:
    """Two ARs by two CLs: however much of a text is its prompt, it ends the same."""
    prompt = (42, 79, 260, 123)
    with Session(virtual_device, GenieModel(graphs_container)) as session:
        whole = ids(session, prompt, max_tokens=40)
        assert len(whole) == 40
        for known in (2, 30):  # AR 16 once; three times, at the longer CL
            assert ids(session, prompt + whole[:known], max_tokens=4) == whole[known : known + 4]


def test_stop_sequences_and_lists_of_eos_end_an_answer(
    session: Session, greedy: tuple[int, ...], changed: Callable[[Edit], str]
) -> None:
    first = next(i for i, token in enumerate(greedy) if token != greedy[0])
    stop = chr(0x100 + greedy[first])
    whole = Generate.of(prompt=TEXT, max_tokens=24).run(session).output.text
    cut = Generate.of(prompt=TEXT, max_tokens=24, stop=("never", stop)).run(session).output
    assert cut.text.rstrip() == whole[: whole.index(stop)].rstrip()
    assert cut.metrics["generated_tokens"] <= first + 1
    ending = "an end-of-sequence token or a stop sequence ended it"
    assert str(cut.early_end) == f"the answer has {first} of 24 tokens: {ending}"
    several = changed(lambda dialog: dialog["context"].update({"eos-token": [1, greedy[first]]}))
    ended = Generate.of(prompt=TEXT, max_tokens=24, genie_config=several).run(session).output
    assert ended.text.rstrip() == cut.text.rstrip()
    assert ended.early_end is not None
    assert ended.early_end.reason == "an end-of-sequence token ended it"
    at_once = changed(lambda dialog: dialog["context"].update({"eos-token": [1, greedy[0]]}))
    none = Generate.of(prompt=TEXT, max_tokens=24, genie_config=at_once).run(session).output
    assert str(none.early_end) == (
        "the answer has 0 of 24 tokens: an end-of-sequence token ended it"
    )


def test_turns_rewind_and_what_was_saved_goes_on(session: Session, tmp_path: Path) -> None:
    first, second = talk(session, TEXT, MORE)
    (alone,) = talk(session, MORE)
    assert second != alone, "the second turn is answered as if it were the first"
    saved = tmp_path / "saved"
    assert talk(session, TEXT, save=str(saved)) == (first,)
    assert talk(session, MORE, restore=str(saved)) == (second,)
    longer, shorter = TEXT + MORE, TEXT + MORE[::-1]
    rewound = talk(session, longer, shorter, rewind=True)
    assert rewound[1] == talk(session, shorter)[0] != rewound[0]


def test_a_state_is_of_its_container_and_written_once(session: Session, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "qnnfarm-state.json").write_text(
        json.dumps({"format": 1, "container_sha256": "0" * 64})
    )
    with pytest.raises(WrongUseError, match="was saved with another container"):
        talk(session, TEXT, restore=str(tmp_path / "saved"))
    with pytest.raises(WrongUseError, match="is no saved dialog"):
        talk(session, TEXT, restore=str(tmp_path))
    with pytest.raises(HostFileError, match="it exists already"):
        talk(session, TEXT, save=str(tmp_path / "saved"))


def test_without_bos_a_prompt_has_its_own_tokens_alone(
    session: Session, changed: Callable[[Edit], str]
) -> None:
    """Measured on Genie 1.21: bos-token -1 puts none before a prompt, so one token more fits."""
    alone = changed(lambda dialog: dialog["context"].update({"bos-token": -1}))
    prompts: tuple[dict[str, object], ...] = ({"prompt": TEXT}, {"tokens": TOKENS})
    for prompt in prompts:
        told = Generate.of(**prompt, max_tokens=2, genie_config=alone).run(session).output.metrics
        assert told["prompt_tokens"] == len(TOKENS)
    longest = TOKENS * 9 + TOKENS[:4]  # CL - AR + 1
    assert len(ids(session, longest, max_tokens=1, genie_config=alone)) == 1
    for tokens, other in ((longest, None), ((*longest, 5), alone)):
        with pytest.raises(PromptTooLongError):
            ids(session, tokens, max_tokens=1, genie_config=other)
    settings = DialogSettings(genie_config=alone)
    deep = GenerationRequest(2, token_ids=TOKENS, fill_token_ids=(7, 8, 9), settings=settings)
    runtime = session.require(Generates)
    later = runtime.added_tokens(settings, after_fill=True)
    assert runtime.generate(deep).metrics["prompt_tokens"] == later + len(TOKENS)


def test_every_stream_of_a_multistream_dialog(
    session: Session, greedy: tuple[int, ...], changed: Callable[[Edit], str]
) -> None:
    block = {"version": 1, "n-streams": 3, "p-threshold": 0.0}
    config = changed(lambda dialog: dialog.update(type="multistream", multistream=block))
    workload = Generate.of(prompt=TEXT, max_tokens=8, genie_config=config)
    streams = workload.run(session).output.streams
    assert len(streams) == len({stream[:1] for stream in streams}) == 3
    assert chr(0x100 + greedy[0]) in {stream.strip()[:1] for stream in streams}
    with pytest.raises(PromptTooLongError):
        Generate.of(prompt=TEXT, max_tokens=20, genie_config=config).run(session)
    with pytest.raises(WrongUseError, match="multistream answers one prompt"):
        talk(session, TEXT, MORE, genie_config=config)


def test_adapters_are_switched_at_run_time(session: Session) -> None:
    def adapted(name: str, strength: float) -> dict[str, object]:
        return {"turns": (TEXT,), "lora": {name: strength}}

    dialogs = (
        (TEXT,), adapted("red", 0.0), adapted("red", 0.5), adapted("red", 1.0),
        adapted("blue", 1.0), adapted("red", 1.0), adapted("red", 0.0),
    )  # fmt: skip
    answers = Dialog.of(dialogs=dialogs, max_tokens=8).run(session).output.answers
    plain, without, half, red, blue, again, removed = (answer for (answer,) in answers)
    assert plain == without == removed, "without an adapter the text is as before"
    assert red == again
    assert len({plain, half, red, blue}) == 4
    alone = Generate.of(prompt=TEXT, max_tokens=8, lora={"red": 1.0}).run(session).output.text
    assert alone == red


def test_an_adapter_that_is_not_there_is_named(
    session: Session, graphs_container: GenAIContainer
) -> None:
    workload = Generate.of(prompt=TEXT, lora={"green": 1.0})
    with pytest.raises(WrongUseError, match=r"no adapter 'green': it has blue, red$"):
        workload.check(session.model)
    with pytest.raises(WrongUseError, match="no LoRA adapters: `qnnfarm build --lora`"):
        workload.check(GenieModel(graphs_container))
    with pytest.raises(WrongUseError, match="Genie applies one at a time"):
        Generate.of(prompt=TEXT, lora={"red": 0.5, "blue": 0.5})
    for strength in (-0.5, 2.5):
        with pytest.raises(WrongUseError, match="the graphs take strengths from 0 to 2; a use"):
            Generate.of(prompt=TEXT, lora={"red": strength}).check(session.model)


def test_an_adapter_beyond_the_ranges_is_told(dialog_container: GenAIContainer) -> None:
    def check(container: GenAIContainer, strength: float) -> None:
        Generate.of(prompt=TEXT, lora={"red": strength}).check(GenieModel(container))

    with pytest.warns(ModelWarning, match=r"red=1.5 is stronger than 1.* are clipped"):
        check(dialog_container, 1.5)
    check(dialog_container, 1.0)  # warnings are errors
    metadata = dialog_container.metadata
    quantization = {**metadata.model.quantization, CLIPPED_ADAPTERS: "blue, red"}
    model = metadata.model.model_copy(update={"quantization": quantization})
    clipped = replace(dialog_container, metadata=metadata.model_copy(update={"model": model}))
    with pytest.warns(ModelWarning, match="red=1 leaves the ranges of the container"):
        check(clipped, 1.0)
    check(clipped, 0.0)


def test_lookahead_of_another_configuration_is_refused(
    virtual_device: Device,
    graphs_container: GenAIContainer,
    genie_checks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QNNFARM_CACHE_DIR", str(genie_checks))
    block = Lade(window=2, ngram=3, gcap=2)
    lade = graphs_container.genie_config.with_type("lade", lade=block)
    (tmp_path / "lade.json").write_text(lade.to_json())
    workload = Generate.of(prompt=TEXT, max_tokens=4, genie_config=str(tmp_path / "lade.json"))
    with (
        Session(virtual_device, GenieModel(graphs_container)) as session,
        pytest.raises(WrongUseError, match="type lade are wrong with Genie"),
    ):
        workload.run(session)


def test_a_dialog_that_speculates_is_refused_where_nothing_checks_it(
    graphs_container: GenAIContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "load_entry", lambda *_: None)
    plain = graphs_container.genie_config
    assert runtime.find_dialog_check(plain, graphs_container) is None
    lade = plain.with_type("lade", lade=Lade(window=2, ngram=3, gcap=2))
    with pytest.raises(WrongUseError, match="need the plugin `speculation`"):
        runtime.find_dialog_check(lade, graphs_container)


def test_the_turns_of_a_conversation_are_traced(
    virtual_device: Device, dialog_container: GenAIContainer, tmp_path: Path
) -> None:
    options, saved = SessionOptions(trace=True, log_level="info"), str(tmp_path / "saved")
    with Session(virtual_device, GenieModel(dialog_container), options) as session:
        talked = Generate.of(prompt=(TEXT, MORE), max_tokens=3, rewind=True, save=saved)
        result = talked.run(session).output
        log = session.runtime.read_log()
        resumed = Generate.of(prompt=MORE, max_tokens=3, restore=saved).run(session).output
    names = Counter(event["name"] for event in json.loads(result.trace)["traceEvents"])
    assert names["GenieDialog_save"] == 1
    assert '"GenieDialog_restore"' in resumed.trace
    assert names["GenieDialog_query"] == names["Dialog::Basic::process"] == 2
    assert names["QnnApi::graphExecute"] >= 2 * 3
    assert names["token 1"] == 1
    assert "[INFO] " in log
