"""Our models and Genie's own parser agree about every configuration, or a rule says why not."""

import json
import os
import re
from dataclasses import dataclass

import pytest

from buildlib.container.genie_files import KINDS, ConfigKind, kind_of
from buildlib.container.genie_validator import (
    DIALOG,
    GenieFunction,
    GenieVerdict,
    ask_genie,
)
from buildlib.validation import Fault
from tests.buildlib.container.genie_configurations import (
    configurations,
    misfits,
    mutations,
)
from tests.buildlib.container.genie_mutations import mutate

LEAST = 300
_SEED = int(os.environ.get("QNNFARM_FUZZ_SEED", "2"))


@dataclass(frozen=True)
class Rule:
    """Why our models refuse what Genie's parser takes.

    Attributes:
        keys: pattern of the last key of the pointer.
        kinds: of our faults.
    """

    reason: str
    keys: str
    kinds: frozenset[str]

    def covers(self, fault: Fault) -> bool:
        last = [step for step in fault.location if isinstance(step, str)][-1]
        return fault.kind in self.kinds and re.fullmatch(self.keys, last) is not None


def rule(reason: str, keys: str, *kinds: str) -> Rule:
    return Rule(reason, keys, frozenset(kinds))


AT_LEAST, ABOVE, AT_MOST = "greater_than_equal", "greater_than", "less_than_equal"
STRICTER = (
    rule("a name or a path without a letter names nothing", r".*", "string_too_short"),
    rule(
        "there are files, adapters and branches, or the block is left out",
        r"ctx-bins|adapters|branches",
        "too_short",
    ),
    rule("a token outside the vocabulary aborts the graph", r"(bos|eos|eot|pad)-token", AT_LEAST),
    rule(
        "a size counts something",
        r"(ctx-|embed-|window-|spatial-merge-)?size|(draft-)?n-vocab|n-embd|(kv|rope|pos-id)-dim|"
        r"update-frequency|reserved-tokens|original-max-position-embeddings|time-step|"
        r"mrope-section",
        AT_LEAST,
    ),
    rule(
        "decoding without a draft, a branch or a stream decodes nothing",
        r"draft-len|branches|forecast-prefix|n-streams|window|ngram|gcap|eaglet-version",
        AT_LEAST,
    ),
    rule("a probability lies between 0 and 1, as documented", r"p-threshold", AT_LEAST, AT_MOST),
    rule("a factor and a period are above 0", r"(\w+-)*factor|rope-theta|scale", ABOVE),
    rule("it is a part of the head", r"partial-rotary-factor", AT_MOST),
    rule(
        "a number that no model has, which Genie narrows without a word",
        r"branches|draft-len|eaglet-version|forecast-prefix|forecast-token-count|gcap|ngram|window|n-streams|pos-id-dim|"
        r"mrope-section|original-max-position-embeddings|spatial-merge-size|time-step",
        AT_MOST,
    ),
    rule(
        "the key counts something",
        r"mrope-section|original-max-position-embeddings|spatial-merge-size|time-step",
        "int_type",
    ),
    rule("it is a number", r"scale|offset|(long|short)-factor", "float_type"),
    rule(
        "a list with an entry for each rotary dimension",
        r"(long|short)-factor|mrope-section",
        "rule",
    ),
    rule("time, height and width", r"mrope-section", "missing", "too_long"),
    rule("prefix and suffix, as documented", r"prompt-template", "missing"),
    rule("the parser takes it, and then no dialog is created", r"sampler|kv-dim", "missing"),
    rule(
        "the parser takes it, and then the scaling is not read",
        r"((low|high)-freq|short|long)?-?factor|original-max-position-embeddings",
        "missing",
    ),
    rule("without a type they are none", r"type|rope-type", "missing"),
    rule("integers of a table mean nothing without it", r"quant-param", "missing"),
    rule("Genie takes it, and no query works", r"datatype", "rule"),
    rule("Genie ignores it, and samples at random", r"greedy", "rule"),
    rule("adapters that are no inputs are sections", r"bin-sections", "missing"),
    rule("a group has adapters of this model", r"members", "rule"),
    rule("a mask is hexadecimal, as documented", r"cpu-mask", "string_pattern_mismatch"),
    rule("Genie takes any word, and knows four", r"kv-update-method", "literal_error"),
    rule("the documents know one", r"ssd-version", "literal_error", "int_parsing_size"),
    rule("an engine has one of four roles", r"role", "literal_error"),
    rule("the documents know no such key", r"surprise", "extra_forbidden"),
)  # fmt: skip


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


def test_every_documented_configuration_is_accepted_by_both(cases: list[Case]) -> None:
    valid = [case for case in cases if case.expected]
    refused = [f"{c.label}: {c.ours or c.genie.faults}" for c in valid if _refused(c)]
    assert len(valid) == len(configurations())
    assert refused == []


def test_what_cannot_stand_together_is_refused_by_both(cases: list[Case]) -> None:
    wrong = [case for case in cases if case.expected is False]
    assert [case.label for case in wrong if not (case.ours and case.genie.faults)] == []
    assert len(wrong) == len(list(misfits()))


def _refused(case: Case) -> bool:
    return bool(case.ours or case.genie.faults)


def test_genie_refuses_nothing_that_our_models_take(cases: list[Case]) -> None:
    laxer = [
        f"{case.label}: {case.genie.faults[0]}"
        for case in cases
        if case.genie.faults and not case.ours
    ]
    assert laxer == []


def test_our_models_refuse_more_only_by_a_listed_rule(cases: list[Case]) -> None:
    stricter = [case for case in cases if case.ours and not case.genie.faults]
    used = {each: next((r for r in STRICTER if r.covers(each.ours[0])), None) for each in stricter}
    assert [f"{case.label}: {case.ours[0]}" for case, found in used.items() if not found] == []
    assert [each.reason for each in STRICTER if each not in used.values()] == []  # none is stale


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
    taken = [case for case in cases if not _refused(case)]
    lossy = []
    for case in taken:
        written = case.kind.model.from_json(case.text).to_json()
        if json.loads(written) != json.loads(case.text):
            lossy.append(case.label)
    assert lossy == []


def test_they_are_many(cases: list[Case]) -> None:
    accepted = sum(not _refused(case) for case in cases)
    assert len(cases) >= LEAST
    assert accepted >= LEAST
    assert len(cases) - accepted >= LEAST


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
def test_genie_refuses_no_random_mutation_that_our_models_take(count: int, seed: int) -> None:
    mutated = list(mutate(configurations(), count, seed))
    kinds = {e.name: kind_of(json.dumps(e.values).encode(), e.name) for e in configurations()}
    asked = [(kinds[each.name], text) for each, text in mutated]
    questions = [(_function(kind), text) for kind, text in asked]
    verdicts = ask_genie(questions, timeout_s=60 + count / 100)
    ours = [bool(kind.model.faults_of(text)) for kind, text in asked]
    laxer = [
        f"{verdict.faults[0]}: {text.decode(errors='replace')}"
        for (_, text), verdict, refused in zip(asked, verdicts, ours, strict=True)
        if verdict.faults and not refused
    ]
    theirs = sum(bool(verdict.faults) for verdict in verdicts)
    more = sum(ours) - theirs + len(laxer)
    said = f"seed {seed}: {count} mutations, libGenie refuses {theirs}, our models {more} more"
    print(said)  # noqa: T201 - for `make genie-mutations`
    assert laxer == []
    assert 0 < more < count - theirs  # both accept some, and ours alone refuse some
