"""Do samplers, stop sequences, turns, adapters and embeddings do what they say?"""

from pathlib import Path

import numpy as np
import pytest

from harness.runtimes.tokenizer import encode, load_tokenizer
from harness.workloads.session import Session
from suites.answers import ask, converse, hold

_PROMPT, _MORE = "In the beginning", " And God said"
_NEW_TOKENS = 3


@pytest.fixture
def basic(session: Session) -> Session:
    """The container, if its dialog takes turns and obeys a sampler."""
    kind = session.container.genie_config.dialog.type
    if kind in {"lade", "multistream", "eaglet"}:
        pytest.skip(f"dialogs of type {kind} are greedy, or have one turn")
    return session


def test_seeded_sampling_reproduces(basic: Session) -> None:
    """The same seed gives the same text, in a fresh process each; top-k 1 is greedy."""
    texts = [ask(basic, _PROMPT, max_tokens=8, temp=1.5, seed=7).text for _ in range(2)]
    assert texts[0] == texts[1]
    greedy = ask(basic, _PROMPT, max_tokens=_NEW_TOKENS).text
    assert ask(basic, _PROMPT, max_tokens=_NEW_TOKENS, temp=1.5, top_k=1).text == greedy


def test_a_stop_sequence_ends_the_answer(basic: Session) -> None:
    """The answer is cut before the sequence."""
    whole = ask(basic, _PROMPT, max_tokens=6).text
    stop = whole.strip()[len(whole.strip()) // 2 :][:2]
    if not stop.strip():
        pytest.skip(f"the answer {whole!r} has nothing to stop at")
    answer = ask(basic, _PROMPT, max_tokens=6, stop=(stop,)).text
    assert answer.rstrip() == whole[: whole.index(stop)].rstrip()


def test_a_saved_dialog_goes_on(basic: Session, tmp_path: Path) -> None:
    """A restored dialog goes on as if nothing had been between."""
    together = converse(basic, _PROMPT, _MORE, max_tokens=_NEW_TOKENS)
    folder = str(tmp_path / "saved")
    first = converse(basic, _PROMPT, max_tokens=_NEW_TOKENS, save=folder)
    second = converse(basic, _MORE, max_tokens=_NEW_TOKENS, restore=folder)
    assert (*first, *second) == together


def test_rewinding_is_as_good_as_a_fresh_start(basic: Session) -> None:
    """A turn that rewinds is answered as if it were the first."""
    other = f"{_PROMPT} of the"
    rewound = converse(basic, f"{_PROMPT} God", other, max_tokens=_NEW_TOKENS, rewind=True)
    assert rewound[1] == ask(basic, other, max_tokens=_NEW_TOKENS).text


def test_an_adapter_comes_and_goes(basic: Session) -> None:
    """Strength 0 is the text without the adapter, also after it was applied."""
    lora = basic.container.genie_config.dialog.target_engine.model.lora
    if lora is None:
        pytest.skip("the container has no adapters")
    name = lora.adapters[0].name
    adapted = [{"turns": [_PROMPT], "lora": {name: strength}} for strength in (0.0, 0.5, 1.0, 0.0)]
    answers = [answer for (answer,) in hold(basic, adapted, 6).answers]
    assert answers[0] == answers[-1] == ask(basic, _PROMPT, max_tokens=6).text


def test_embeddings_are_answered_as_their_tokens(basic: Session, tmp_path: Path) -> None:
    """The rows of the container's own table, that of bos in front, are the prompt."""
    dialog = basic.container.genie_config.dialog
    embedding = dialog.embedding
    if embedding is None or embedding.lut_path is None:
        pytest.skip("the container looks tokens up in its graph")
    types = {"float32": np.float32, "ufixed16": np.uint16, "sfixed16": np.int16}
    if embedding.datatype not in types:
        pytest.skip(f"the table has {embedding.datatype}, and the graph's input more bits")
    table = np.fromfile(basic.container.files[embedding.lut_path], types[embedding.datatype])
    tokenizer = load_tokenizer(basic.model.tokenizer)
    bos = dialog.context.bos_token
    prompt = [*([bos] if bos >= 0 else []), *encode(tokenizer, _PROMPT)]
    table.reshape(-1, embedding.size)[prompt].tofile(tmp_path / "rows.raw")
    rows = ask(basic, embeddings=str(tmp_path / "rows.raw"), max_tokens=_NEW_TOKENS).text
    assert rows == ask(basic, _PROMPT, max_tokens=_NEW_TOKENS).text
