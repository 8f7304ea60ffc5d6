"""Our model and QNN's own library agree about every key of HTP backend extensions."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from buildlib.container.genie_validator import EXTENSIONS, GenieVerdict, ask_genie
from buildlib.container.htp_config import HtpConfig, HtpGraphEntry
from buildlib.errors import InputFileError
from buildlib.toolchains.htp_extensions import (
    HtpContextConfig,
    HtpDeviceConfig,
    HtpDeviceCoreConfig,
    HtpGroupContextConfig,
    HtpMemoryConfig,
    HtpOptions,
)
from buildlib.validation import Fault

SECTIONS: Mapping[str, type[HtpOptions]] = {
    "": HtpConfig,
    "/devices/0": HtpDeviceConfig,
    "/devices/0/cores/0": HtpDeviceCoreConfig,
    "/graphs/0": HtpGraphEntry,
    "/context": HtpContextConfig,
    "/memory": HtpMemoryConfig,
    "/groupContext": HtpGroupContextConfig,
}
GENERAL: tuple[object, ...] = (
    "x", 0, 1, 2, 3, -1, 1.5, 1.0, 3.0, 2**31 - 1, 2**31, 2**63, True, False, None,
    [], ["x"], [0], [{}], {}, {"x": 1},
)  # fmt: skip
WORDS: Mapping[str, tuple[str, ...]] = {
    "perf_profile": ("burst", "llm_decode_burst", "system_settings", "BURST", "extreme"),
    "pd_session": ("signed", "unsigned", "adaptive"),
    "mem_type": ("shared_buffer", "shared"),
    "dsp_arch": ("v79", "v81", "79"),
}
STRICTER = {
    "less_than_equal": ".*",  # beyond 2^31, and levels that the documents do not have
    "greater_than_equal": "/graphs/0/(O|hvx_threads|num_cores)",
    "literal_error": "/graphs/0/(dlbc|dlbc_weights|fp16_relaxed_precision)",
    "null": "/devices/0/cores/0/core_id",
    "int_type": "/devices/0/cores/0/core_id",
}
"""Kinds of our faults, and their places, where the library takes more than the documents have."""


def base() -> dict[str, Any]:
    core = {"core_id": 0, "perf_profile": "burst"}
    return {
        "devices": [{"soc_model": 69, "dsp_arch": "v79", "cores": [core]}],
        "memory": {"mem_type": "shared_buffer"},
        "context": {"weight_sharing_enabled": False},
        "graphs": [{"graph_names": ["a"], "O": 3}],
        "groupContext": {"share_resources": True},
    }


def changed(place: str, key: str, value: object) -> bytes:
    values: dict[str, Any] = base()
    holder: Any = values
    for step in place.split("/")[1:]:
        holder = holder[int(step) if step.isdigit() else step]
    holder[key] = value
    return json.dumps(values).encode()


def keys(model: type[HtpOptions]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield field.serialization_alias or name


Case = tuple[str, str, object]


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[Case, tuple[Fault, ...], GenieVerdict]]:
    """Each key with each value: whether ours and the library's refuse it."""
    cases = [
        (place, key, value)
        for place, model in SECTIONS.items()
        for key in (*keys(model), "surprise")
        for value in (*GENERAL, *WORDS.get(key, ()))
    ]
    texts = [changed(*case) for case in cases]
    verdicts = ask_genie([(EXTENSIONS, text) for text in texts])
    assert len(cases) > 500
    return {
        f"{case[0]}/{case[1]} = {case[2]!r}": (case, HtpConfig.faults_of(text), verdict)
        for case, text, verdict in zip(cases, texts, verdicts, strict=True)
    }


def test_our_model_takes_nothing_that_the_library_drops(
    answers: dict[str, tuple[Case, tuple[Fault, ...], GenieVerdict]],
) -> None:
    laxer = [name for name, (_, ours, theirs) in answers.items() if theirs.faults and not ours]
    assert {name.partition(" = ")[0] for name in laxer} == {
        "/graphs/0/surprise",
        "/devices/0/cores/0/surprise",
    }


def test_it_refuses_more_only_where_the_documents_have_less(
    answers: dict[str, tuple[Case, tuple[Fault, ...], GenieVerdict]],
) -> None:
    more = [fault for _, ours, theirs in answers.values() if not theirs.faults for fault in ours]
    unexplained = [
        str(fault)
        for fault in more
        if not re.fullmatch(STRICTER.get(fault.kind, "never"), fault.pointer)
    ]
    assert unexplained == []
    assert {fault.kind for fault in more} == STRICTER.keys()  # none is stale


def test_the_library_knows_every_key_of_the_model(
    answers: dict[str, tuple[Case, tuple[Fault, ...], GenieVerdict]],
) -> None:
    """It takes some value of a key that it knows, and drops the file for others."""
    taken: dict[str, set[bool]] = {}
    for (place, key, _), _, theirs in answers.values():
        taken.setdefault(f"{place}/{key}", set()).add(not theirs.faults)
    strangers = {key for key, words in taken.items() if len(words) == 1}
    ignored = {f"{place}/surprise" for place in ("", "/devices/0", "/context", "/memory")}
    assert strangers == {*ignored, "/groupContext/surprise"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"devices": [{"pd_sesion": "unsigned"}]}', "/devices/0/pd_sesion: .* mean pd_session"),
        ('{"contexts": {}}', "/contexts: unknown key: did you mean context"),
        ('{"devices": {"soc_model": 69}}', "/devices: must be a list"),
        ('{"devices": [{"dsp_arch": "v79"}], "devices": []}', "'devices' stands twice"),
    ],
)
def test_a_misspelling_is_named(text: str, said: str) -> None:
    with pytest.raises(InputFileError, match=said):
        HtpConfig.from_json(text)


def test_what_has_no_effect_is_noted_and_kept() -> None:
    values = {
        "devices": [{"dsp_arch": "v75", "cores": [{"perf_profile": "llm_decode_burst"}]}],
        "memory": {"extended_udma": True},
        "context": {"max_spill_fill_buffer_for_group": 1},
    }
    config = HtpConfig.from_json(json.dumps(values))
    assert [str(note) for note in config.remarks()] == [
        "/devices/0/cores/0/perf_profile: llm_decode_burst needs Hexagon v79, and this is v75",
        "/memory/extended_udma: unknown key: it has no effect",
        "/context/max_spill_fill_buffer_for_group: it has no effect without group_id 0",
    ]
    assert json.loads(config.to_json()) == values
