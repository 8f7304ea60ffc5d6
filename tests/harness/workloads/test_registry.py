"""Every workload goes to JSON and through pickle, and comes back as it was."""

import pickle
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib import entry_points
from harness.errors import WrongUseError
from harness.workloads.bench import Bench
from harness.workloads.command import Command
from harness.workloads.dialog import Dialog
from harness.workloads.generate import Generate
from harness.workloads.perplexity import Perplexity
from harness.workloads.registry import AnyWorkload, from_json, to_json
from harness.workloads.verify import Verify

TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30
)
COUNTS = st.integers(1, 10_000)
BOUNDS = st.none() | st.floats(1, 1e300) | st.sampled_from(["5%", "20"])
DIALOGS = st.lists(st.lists(TEXTS, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3)
WORKLOADS: st.SearchStrategy[AnyWorkload] = st.one_of(
    st.builds(
        Bench,
        prompt_tokens=st.integers(2, 10_000),
        new_tokens=COUNTS,
        repetitions=COUNTS,
        warmup=st.just("auto") | st.integers(0, 10_000),
        most_warmups=COUNTS,
        reference_tokens=st.none() | TEXTS,
        max_perplexity=BOUNDS,
    ),
    st.builds(
        Perplexity,
        text=TEXTS,
        windows=st.none() | COUNTS,
        max=BOUNDS,
        reference=st.just("model"),
        reference_with=st.none() | st.sampled_from(["onnx", "transformers"]),
    ),
    st.builds(
        Verify, text=TEXTS, reference=TEXTS, windows=COUNTS, max_kl=st.none() | st.floats(0, 9)
    ),
    st.builds(Generate, prompt=TEXTS, max_tokens=COUNTS, expect=st.none() | TEXTS),
    st.builds(Dialog, dialogs=DIALOGS.map(tuple), max_tokens=COUNTS),
    st.builds(Command, command=st.tuples(st.just("echo"), TEXTS)),
)


@given(WORKLOADS)
def test_a_workload_comes_back(workload: AnyWorkload) -> None:
    assert from_json(to_json(workload)) == workload
    assert pickle.loads(pickle.dumps(workload)) == workload  # noqa: S301
    assert hash(from_json(to_json(workload))) == hash(workload)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"kind": "no-such"}', '{"kind": "generate"}', '{"kind": "bench", "a": 1}']
)
def test_invalid_workloads_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        from_json(text)


@pytest.mark.needs("plugins.encoders")
def test_an_unknown_kind_is_told_with_all_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"'embde'.*'bench', .*'embed', .*'verify'"):
        from_json('{"kind": "embde"}')


def test_a_kind_whose_plugin_is_broken_is_no_readable_workload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker of a lab would end with another error than that of a wrong job."""
    broken = EntryPoint("nap", "tests.no_such_module:Nap", "qnnfarm.workloads")
    monkeypatch.setattr(entry_points, "installed", lambda _door: EntryPoints([broken]))
    with pytest.raises(ValueError, match=r"nap of qnnfarm\.workloads .*cannot be loaded"):
        from_json('{"kind": "nap"}')


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        (Dialog, {"dialogs": (("a turn", ""),)}, "^dialogs"),
        (Perplexity, {"reference_with": "transformers"}, "computes the reference"),
    ],
)
def test_wrong_values_of_a_user_are_one_line(
    kind: type[Dialog | Perplexity], fields: dict[str, object], reason: str
) -> None:
    more = {"text": "a"} if kind is Perplexity else {}
    with pytest.raises(WrongUseError, match=reason) as caught:
        kind.of(**more, **fields)
    assert "\n" not in str(caught.value)
