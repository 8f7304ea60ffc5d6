"""Our models and Genie's own parser agree about every configuration, or a rule says why not."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from buildlib.container.genie_validator import (
    DIALOG,
    EXTENSIONS,
    GenieFunction,
    GenieVerdict,
    ask_genie,
)
from buildlib.validation import Fault
from plugins.diagnosis.genie_files import KINDS, ConfigKind, kind_of
from tests.buildlib.container.genie_configurations import (
    configurations,
    misfits,
    mutations,
)
from tests.plugins.diagnosis.genie_mutations import mutate

LEAST = 300
LEAST_FOR_ALL_RULES = 20_000
_SEED = int(os.environ.get("QNNFARM_FUZZ_SEED", "2"))


AT_LEAST, ABOVE, AT_MOST = "greater_than_equal", "greater_than", "less_than_equal"
_FACTORS = "((low|high)-freq|short|long|partial-rotary)-factor|factor|mrope-section"
_MROPE = "mrope-section|original-max-position-embeddings|spatial-merge-size|time-step"
STRICTER: Mapping[str, Mapping[str, str]] = {
    "An object has a key once; Genie takes the last of several.": {"repeated": ""},
    "A name, a path and a list of files, adapters or branches is not empty.": {
        "string_too_short": ".*",
        "too_short": "ctx-bins|adapters|branches|positional-encoding|cache-groups|eos-token",
    },
    "A size or a count is a whole number from 1 (from 0 where 0 means none), and below 2^31 or "
    "2^63: Genie narrows others without a word.": {
        AT_LEAST: ".*",
        AT_MOST: ".*",
        "int_type": f"{_MROPE}|accumulator-size|height|width",
        "int_parsing_size": ".*",
    },
    "A factor, a period and a scale is a number above 0, a share or a probability at most 1.": {
        ABOVE: f"{_FACTORS}|rope-theta|scale",
        "float_type": f"{_FACTORS}|scale|offset",
    },
    "What a dialog cannot be created or read without is there: `sampler`, `kv-dim`, `type`, "
    "`rope-type`, what a scaling is made of, and the grid of a table of integers.": {
        "missing": f"sampler|kv-dim|(rope-)?type|{_FACTORS}|{_MROPE}|quant-param|scale|offset|"
        "bin-sections",
    },
    "A list has an entry for each rotary dimension, a section for time, height and width, and a "
    "template a prefix and a suffix.": {
        "rule": "(long|short)-factor|mrope-section",
        "too_long": "mrope-section|prompt-template",
        "missing": "mrope-section|prompt-template",
    },
    "A word is one that the documents know, a mask hexadecimal, and no key stands where they do "
    "not have it.": {
        "literal_error": "kv-update-method|ssd-version|role|backend",
        "string_pattern_mismatch": "cpu-mask",
        "extra_forbidden": ".*",
        "rule": f"rope-dim|quant-param|{_FACTORS}|{_MROPE}",
    },
    "What Genie takes and then does otherwise: a native lookup table, a group of adapters that are "
    "not there.": {"rule": "datatype|members"},
    "The section of a node is there and an object, and nothing stands behind the file's.": {
        "model_type": "(text|image)-encoder|text-generator",
        "missing": "(text|image)-encoder|text-generator",
        "json_invalid": "",
    },
}  # fmt: skip
"""Rules by which our models refuse what Genie's parser takes, as the documents list them: kinds of
our faults, and the last key of their pointers."""


def rule_of(fault: Fault) -> str | None:
    """The rule that explains a fault."""
    last = next((step for step in reversed(fault.location) if isinstance(step, str)), "")
    for reason, faults in STRICTER.items():
        if fault.kind in faults and re.fullmatch(faults[fault.kind], last):
            return reason
    return None


@dataclass(frozen=True)
class Case:
    """A configuration that both have judged.

    Attributes:
        expected: whether it is documented, or none that there can be; `None` for a mutation.
    """

    label: str
    expected: bool | None
    around: str
    text: bytes
    kind: ConfigKind
    ours: tuple[Fault, ...]
    genie: GenieVerdict

    @property
    def accepted(self) -> bool:
        return not self.ours and not self.genie.faults

    @property
    def is_right(self) -> bool:
        """Whether both say of it what is expected."""
        return {bool(self.ours), bool(self.genie.faults)} == {not self.expected}


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    asked: dict[bytes, tuple[str, bool | None, str, ConfigKind]] = {}
    for label, values in misfits():
        asked[json.dumps(values).encode()] = (label, False, "", KINDS[0])
    for each in configurations():
        text = json.dumps(each.values).encode()
        kind = kind_of(text, each.name)
        asked[text] = (each.name, True, "", kind)
        for mutation in mutations(each):
            label = f"{each.name}, {mutation.change}"
            asked.setdefault(mutation.text, (label, None, mutation.around, kind))
    verdicts = ask_genie([(_function(kind), text) for text, (*_, kind) in asked.items()])
    return [
        Case(label, expected, around, text, kind, kind.model.faults_of(text), verdict)
        for (text, (label, expected, around, kind)), verdict in zip(
            asked.items(), verdicts, strict=True
        )
    ]


def _function(kind: ConfigKind) -> GenieFunction:
    assert kind.genie is not None
    return kind.genie


def test_the_documents_list_the_rules() -> None:
    text = (Path(__file__).parents[3] / "docs" / "genie-configurations.md").read_text("utf-8")
    section = " ".join(text.partition("take more:")[2].partition("\n\n`make")[0].split())
    assert section == " ".join(f"- {reason}" for reason in STRICTER)


def test_documented_configurations_are_accepted_and_misfits_refused_by_both(
    cases: list[Case],
) -> None:
    wrong = [case.label for case in cases if case.expected is not None and not case.is_right]
    assert wrong == []
    expected = Counter(case.expected for case in cases)
    assert (expected[True], expected[False]) == (len(configurations()), len(list(misfits())))


def test_our_models_refuse_what_genie_does_and_more_only_by_a_listed_rule(
    cases: list[Case],
) -> None:
    laxer = [
        f"{case.label}: {case.genie.faults[0]}"
        for case in cases
        if not case.ours and case.genie.faults
    ]
    assert laxer == []
    stricter = [fault for case in cases if not case.genie.faults for fault in case.ours]
    assert [str(fault) for fault in stricter if rule_of(fault) is None] == []
    accepted = sum(case.accepted for case in cases)
    assert min(accepted, len(cases) - accepted) >= LEAST


def test_every_key_of_our_models_stands_in_a_configuration_that_genie_takes() -> None:
    """So that a key which libGenie does not know cannot be added to a model."""
    parsed = [kind for kind in KINDS if kind.genie not in {None, EXTENSIONS}]
    ours = {key for kind in parsed for model in _models_of(kind.model) for key in _keys(model)}
    texts = [json.dumps(each.values).encode() for each in configurations()]
    read = {
        _key(type(block), name)
        for text in texts
        for block in _blocks(kind_of(text, "").model.from_json(text))
        for name in block.model_fields_set
    }
    assert {" ".join(key) for key in ours - read} == set()
    assert len(ours) > 150


def _key(model: type[BaseModel], name: str) -> tuple[str, str]:
    """The first class that has a key, and its name."""
    bases = [base for base in model.__mro__ if name in getattr(base, "model_fields", {})]
    return bases[-1].__name__, name


def _keys(model: type[BaseModel]) -> set[tuple[str, str]]:
    return {_key(model, name) for name in model.model_fields}


def _blocks(value: object) -> Iterator[BaseModel]:
    if isinstance(value, BaseModel):
        yield value
        for name in type(value).model_fields:
            yield from _blocks(getattr(value, name))
    elif isinstance(value, tuple):
        for entry in value:
            yield from _blocks(entry)


def _models_of(annotation: Any) -> Iterator[type[BaseModel]]:  # noqa: ANN401 - a type, or a union
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from _models_of(field.annotation)
    for argument in get_args(annotation):
        yield from _models_of(argument)


def test_both_name_the_same_place(cases: list[Case]) -> None:
    """One change was made: each names the place, one around it, or one beside it."""
    elsewhere = [
        f"{case.label}: {fault}"
        for case in cases
        if case.ours and case.genie.faults
        for fault in (*case.ours, *case.genie.faults)
        if not (fault.pointer.startswith(case.around) or case.around.startswith(fault.pointer))
    ]
    assert elsewhere == []


def test_what_both_take_is_written_as_it_was_read(cases: list[Case]) -> None:
    def written(case: Case) -> object:
        return json.loads(case.kind.model.from_json(case.text).to_json())

    taken = [case for case in cases if case.accepted]
    assert [case.label for case in taken if written(case) != json.loads(case.text)] == []


def test_genie_survives_a_crash() -> None:
    """A configuration that ends Genie is judged as such, and those behind it are still asked."""
    text = json.dumps(configurations()[0].values).encode()
    verdicts = ask_genie([(DIALOG, text), (GenieFunction("abort"), text), (DIALOG, text)])
    assert [verdict.status for verdict in verdicts] == [0, 6, 0]
    assert str(verdicts[1].faults[0]) == "Genie was ended by SIGABRT"


@pytest.mark.parametrize(
    ("count", "seed"),
    [(500, 1), pytest.param(30_000, _SEED, marks=pytest.mark.slow)],
)
def test_random_mutations_are_refused_by_both_or_by_a_listed_rule(count: int, seed: int) -> None:
    mutated = list(mutate(configurations(), count, seed))
    kinds = {e.name: kind_of(json.dumps(e.values).encode(), e.name) for e in configurations()}
    asked = [(kinds[each.name], text) for each, text in mutated]
    questions = [(_function(kind), text) for kind, text in asked]
    verdicts = ask_genie(questions, timeout_s=60 + count / 100)
    laxer, more = [], []
    for (kind, text), verdict in zip(asked, verdicts, strict=True):
        ours = kind.model.faults_of(text)
        if verdict.faults and not ours:
            laxer.append(f"{verdict.faults[0]}: {text.decode(errors='replace')}")
        if ours and not verdict.faults:
            more.append(ours)
    theirs = sum(bool(verdict.faults) for verdict in verdicts)
    used = Counter(rule_of(ours[0]) for ours in more)
    said = [
        f"seed {seed}: {count} mutations, libGenie refuses {theirs}, our models {len(more)} more"
    ]
    said += [f"{number:6} {reason}" for reason, number in used.most_common()]
    print("\n".join(said))  # noqa: T201 - for `make genie-mutations`
    assert laxer == []
    assert [str(fault) for ours in more for fault in ours if rule_of(fault) is None] == []
    assert 0 < len(more) < count - theirs  # both accept some, and ours alone refuse some
    assert count < LEAST_FOR_ALL_RULES or used.keys() == STRICTER.keys()  # none is stale
