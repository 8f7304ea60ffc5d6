"""Trains `tokenizer.json`: a byte-level BPE, so that any Unicode text survives the round trip.

`python -m tools.tiny_llama.vocabulary` writes it again from the training text. The weights
belong to one vocabulary: after a change, train again.
"""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from suites.models import tiny_llama

BEGIN_OF_TEXT = "<|begin_of_text|>"
END_OF_TEXT = "<|end_of_text|>"
SIZE = 1280
"""Above 1,000, because Genie's look-ahead decoding feeds ids up to that."""


def train(text: Path) -> Tokenizer:
    """Return a tokenizer of `SIZE` tokens; ids 0 and 1 are begin and end of text.

    Begin of text stands before a text, as in training.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=SIZE,
        special_tokens=[BEGIN_OF_TEXT, END_OF_TEXT],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(text)], trainer)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BEGIN_OF_TEXT} $A",
        pair=f"{BEGIN_OF_TEXT} $A {BEGIN_OF_TEXT}:1 $B:1",
        special_tokens=[(BEGIN_OF_TEXT, 0)],
    )
    return tokenizer


if __name__ == "__main__":
    train(tiny_llama.folder() / "text" / "train.txt").save(
        str(tiny_llama.folder() / "tokenizer.json")
    )
