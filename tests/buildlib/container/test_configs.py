"""The typed configurations, with Genie's own parser as the judge."""

import json
import sys
from pathlib import Path
from types import FrameType

import pytest
from pydantic import ValidationError

from buildlib.container.genie_config import Context, GenieConfig, basic_dialog
from buildlib.container.genie_decoding import Sampler, TokenPenalty
from buildlib.container.genie_engine import LoraAdapter, RopeScaling
from buildlib.container.genie_validator import check_genie_config, check_genie_text
from buildlib.container.htp_config import HtpConfig
from buildlib.container.writer import htp_config
from buildlib.errors import InputFileError
from buildlib.targets import parse_target
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.htp_extensions import HtpContextConfig

LLAMA3 = RopeScaling(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
AI_HUB_HTP = """{
  "devices": [{"soc_model": 69, "dsp_arch": "v79",
    "cores": [{"core_id": 0, "perf_profile": "burst", "rpc_control_latency": 100}]}],
  "memory": {"mem_type": "shared_buffer"},
  "context": %s
}"""


def judged(config: GenieConfig, folder: Path) -> None:
    with pytest.raises(InputFileError, match="No such file"):
        check_genie_config(folder)
    (folder / "genie_config.json").write_text(config.to_json())
    check_genie_config(folder)


@pytest.mark.parametrize("emulator", [True, False])
def test_genie_accepts_everything_we_can_say(emulator: bool, tmp_path: Path) -> None:
    config = basic_dialog(
        context=Context(
            size=4096, n_vocab=128256, bos_token=1, eos_token=(2, 3), pad_token=0, n_embd=2048
        ),
        head_dim=64,
        rotary_dim=64,
        rope_theta=500000.0,
        rope_scaling=LLAMA3,
        ctx_bins=("m_part_1_of_1.bin",),
        emulator=emulator,
    )
    penalty = TokenPenalty(penalize_last_n=64, repetition_penalty=1.1)
    sampler = Sampler(seed=7, temp=0.8, top_k=40, top_p=0.9, greedy=False, token_penalty=penalty)
    full = config.with_dialog(sampler=sampler, max_num_tokens=16)
    judged(full, tmp_path)
    assert GenieConfig.from_json(full.to_json()) == full
    assert full.dialog.max_num_tokens == 16
    assert config.dialog.max_num_tokens is None
    files = ("m_part_1_of_1.bin", "tokenizer.json", "htp_backend_ext_config.json")
    assert config.referenced_files == files


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\0", b"null", b"\xff\xfe", b"[" * 5000])
def test_nonsense_is_refused_by_both(text: bytes) -> None:
    with pytest.raises(InputFileError) as ours:
        GenieConfig.from_json(text)
    with pytest.raises(InputFileError) as genies:
        check_genie_text(text, "genie_config.json")
    assert "\n" not in str(ours.value) + str(genies.value)


@pytest.mark.parametrize("rest", ["", ', "top-k": 40', ', "temp": 0.5', ', "type": "basic"'])
def test_greedy_that_genie_ignores_is_noted(rest: str) -> None:
    sampler = Sampler.from_json(f'{{"version": 1, "greedy": true{rest}}}')
    assert ["top-k 1 or temp 0" in str(note) for note in sampler.remarks()] == [True]


@pytest.mark.parametrize("rest", ['"top-k": 1', '"temp": 0', '"temp": 0.0, "top-k": 40'])
def test_greedy_that_something_else_makes_so_is_kept(rest: str) -> None:
    text = f'{{"version": 1, "greedy": true, {rest}}}'
    sampler = Sampler.from_json(text)
    assert sampler.is_greedy
    assert list(sampler.remarks()) == []
    assert json.loads(sampler.to_json()) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"version": 1, "seed": 1, "seed": 2}', "'seed' stands twice"),
        ('{"version": 1, "seed": null}', "/seed: must not be null"),
        ('{"seed": 1}', "/version: it is missing"),
        ('{"version": 1, "top_k": 1}', "/top_k: unknown key: did you mean top-k"),
        ('{"version": 1, "TOP-K": 1}', "/TOP-K: unknown key: did you mean top-k"),
        ('{"version": 1.0}', "/version: must be a whole number, not 1.0"),
        ('{"version": 1, "temp": 1e308}', "/temp: must be at most 3.4"),
        ('{"version": 1, "type": "custom"}', "/callback-name: it is missing"),
        ('{"version": 1, "type": "custom", "callback-name": "f", "seed": 1}', "/seed: a sampler"),
    ],
)
def test_what_a_file_must_not_say(text: str, said: str) -> None:
    with pytest.raises(InputFileError, match=said):
        Sampler.from_json(text)


def test_a_key_of_older_documents_is_hinted_at_what_it_became() -> None:
    text = '{"version": 1, "name": "a", "lora-weights-dir": "lora/a"}'
    with pytest.raises(InputFileError, match="/lora-weights-dir: unknown key: did you mean path"):
        LoraAdapter.from_json(text)


def test_tokens_beyond_the_vocabulary_are_noted_and_negative_ones_refused() -> None:
    context = Context(size=192, n_vocab=1000, bos_token=1200, eos_token=(1, 1000), pad_token=999)
    assert [note.pointer for note in context.remarks()] == ["/bos-token", "/eos-token/1"]
    with pytest.raises(ValidationError):
        Context(size=192, n_vocab=1280, bos_token=0, eos_token=(1, -1))


@pytest.mark.parametrize(
    "context", ['{"weight_sharing_enabled": true}', '[{"weight_sharing_enabled": true}]']
)
def test_htp_context_is_read_in_both_forms_and_kept(context: str) -> None:
    config = HtpConfig.from_json(AI_HUB_HTP % context)
    assert config.contexts == (HtpContextConfig(weight_sharing_enabled=True),)
    assert json.loads(config.to_json()) == json.loads(AI_HUB_HTP % context)


def test_htp_graphs_section_keeps_the_vendors_keys() -> None:
    values = {
        "devices": [{"soc_model": 69, "dsp_arch": "v79", "cores": []}],
        "graphs": [{"graph_names": ["a"], "O": 3, "vtcm_mb": 8, "dlbc": 1}],
        "groupContext": {"share_resources": True},
    }
    assert json.loads(HtpConfig.from_json(json.dumps(values)).to_json()) == values


def test_an_interrupt_while_a_configuration_is_written_is_not_lost(
    genie_config: GenieConfig,
) -> None:
    """Pydantic drops what is raised in a discriminator that it calls, as by Ctrl-C."""
    called: list[str] = []

    def record(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(record)
    try:
        genie_config.model_dump(mode="json")
    finally:
        sys.setprofile(None)
    assert called == ["model_dump"]


PHONE = parse_target("SM8750")


def test_options_of_the_run_reach_the_file_and_those_of_the_compiler_do_not() -> None:
    config = CompileConfig.for_target(PHONE).with_options(
        {
            "devices.cores.perf_profile": "balanced",
            "groupContext.share_resources": True,
            "graphs.hvx_threads": 4,
            "context.weight_sharing_enabled": False,
            "context.extended_udma": True,
            "context.file_read_memory_budget_in_mb": 64,
            "devices.pd_session": "unsigned",
        }
    )
    written = htp_config(config)
    core = json.loads(written.to_json())["devices"][0]["cores"][0]
    assert core == {"core_id": 0, "perf_profile": "balanced", "rpc_control_latency": 100}
    assert written.group_context is not None
    assert written.group_context.share_resources
    assert [context.weight_sharing_enabled for context in written.contexts] == [False]
    assert written.graphs is None
    assert [context.file_read_memory_budget_in_mb for context in written.contexts] == [64]
    assert [device.pd_session for device in written.devices or ()] == ["unsigned"]
    assert "extended_udma" not in written.to_json()
    assert HtpConfig.from_json(written.to_json()) == written


def test_a_target_alone_gives_the_defaults() -> None:
    assert htp_config(PHONE) == htp_config(CompileConfig.for_target(PHONE))
    both = [htp_config(parse_target(text)) for text in ("SM8650", "SM8650:emulator")]
    assert [device.soc_model for device in both[0].devices or ()] == [57]
    sharing = [c.weight_sharing_enabled for each in both for c in each.contexts]
    assert sharing == [True, False]


def test_unknown_options_are_written_as_they_are() -> None:
    config = CompileConfig.from_backend_extensions({"devices": [{"odd": 1}], "more": {}}, PHONE)
    written = json.loads(htp_config(config).to_json())
    assert (written["devices"][0]["odd"], written["more"]) == (1, {})
