"""Do samplers, stop sequences, turns, adapters and embeddings do what they say?"""

from pathlib import Path

import numpy as np
import pytest

from harness.pytest_plugin.container_runner import ContainerRunner
from harness.runtimes.dialog_settings import DialogSettings
from harness.runtimes.tokenizer import encode, load_tokenizer

_PROMPT, _MORE = "In the beginning", " And God said"
_NEW_TOKENS = 3


@pytest.fixture
def basic(run_container: ContainerRunner) -> ContainerRunner:
    """The container, if its dialog takes turns and obeys a sampler."""
    kind = run_container.container.genie_config.dialog.type
    if kind in {"lade", "multistream", "eaglet"}:
        pytest.skip(f"dialogs of type {kind} are greedy, or have one turn")
    return run_container


def test_seeded_sampling_reproduces(basic: ContainerRunner) -> None:
    """The same seed gives the same text, in a fresh process each; top-k 1 is greedy."""
    seeded = DialogSettings(temp=1.5, seed=7)
    texts = [basic(_PROMPT, max_new_tokens=8, settings=seeded).text for _ in range(2)]
    assert texts[0] == texts[1]
    top = DialogSettings(temp=1.5, top_k=1)
    greedy = basic(_PROMPT, max_new_tokens=_NEW_TOKENS).text
    assert basic(_PROMPT, max_new_tokens=_NEW_TOKENS, settings=top).text == greedy


def test_a_stop_sequence_ends_the_answer(basic: ContainerRunner) -> None:
    """The answer is cut before the sequence."""
    whole = basic(_PROMPT, max_new_tokens=6).text
    stop = whole.strip()[len(whole.strip()) // 2 :][:2]
    if not stop.strip():
        pytest.skip(f"the answer {whole!r} has nothing to stop at")
    cut = basic(_PROMPT, max_new_tokens=6, settings=DialogSettings(stop=(stop,))).text
    assert cut.rstrip() == whole[: whole.index(stop)].rstrip()


def test_a_saved_dialog_goes_on(basic: ContainerRunner, tmp_path: Path) -> None:
    """A restored dialog goes on as if nothing had been between."""
    together = basic.converse(_PROMPT, _MORE, max_new_tokens=_NEW_TOKENS)
    first = basic.converse(_PROMPT, max_new_tokens=_NEW_TOKENS, save=tmp_path / "saved")
    second = basic.converse(_MORE, max_new_tokens=_NEW_TOKENS, restore=tmp_path / "saved")
    assert (*first, *second) == together


def test_rewinding_is_as_good_as_a_fresh_start(basic: ContainerRunner) -> None:
    """A turn that rewinds is answered as if it were the first."""
    changed = f"{_PROMPT} of the"
    rewound = basic.converse(f"{_PROMPT} God", changed, max_new_tokens=_NEW_TOKENS, rewind=True)
    assert rewound[1] == basic(changed, max_new_tokens=_NEW_TOKENS).text


def test_an_adapter_comes_and_goes(basic: ContainerRunner) -> None:
    """Strength 0 is the text without the adapter, also after it was applied."""
    lora = basic.container.genie_config.dialog.target_engine.model.lora
    if lora is None:
        pytest.skip("the container has no adapters")
    name = lora.adapters[0].name
    adapted = [{"turns": [_PROMPT], "lora": {name: strength}} for strength in (0.0, 0.5, 1.0, 0.0)]
    answers = [answer for (answer,) in basic.dialogs(adapted, max_new_tokens=6).answers]
    assert answers[0] == answers[-1] == basic(_PROMPT, max_new_tokens=6).text


def test_embeddings_are_answered_as_their_tokens(basic: ContainerRunner, tmp_path: Path) -> None:
    """The rows of the container's own table, that of bos in front, are the prompt."""
    dialog = basic.container.genie_config.dialog
    embedding = dialog.embedding
    if embedding is None or embedding.lut_path is None:
        pytest.skip("the container looks tokens up in its graph")
    types = {"float32": np.float32, "ufixed16": np.uint16, "sfixed16": np.int16}
    if embedding.datatype not in types:
        pytest.skip(f"the table has {embedding.datatype}, and the graph's input more bits")
    table = np.fromfile(basic.container.files[embedding.lut_path], types[embedding.datatype])
    tokenizer = load_tokenizer(basic.container.files["tokenizer.json"])
    prompt = [dialog.context.bos_token, *encode(tokenizer, _PROMPT)]
    table.reshape(-1, embedding.size)[prompt].tofile(tmp_path / "rows.raw")
    rows = basic(embeddings=tmp_path / "rows.raw", max_new_tokens=_NEW_TOKENS).text
    assert rows == basic(_PROMPT, max_new_tokens=_NEW_TOKENS).text
