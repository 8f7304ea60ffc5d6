"""Exports of transformers' text encoders.

Of those that count positions over all that is no padding: inputs `input_ids` and `attention_mask`
[batch, tokens], output `last_hidden_state`. `sample.npz` holds texts `ids_<n>` [1, n] and what
torch answers, `states_<n>` [1, n, hidden].

`sentence-bert` is a folder of sentence-transformers, with the ONNX that a build exports of it. Its
`sample.npz` holds `texts`, and their `vectors` [n, hidden] by torch: the mean of the tokens, scaled
to a length of 1. Run inside an environment that has torch and transformers.
"""

import json
import shutil
import string
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from plugins.encoders import export_worker
from tools.exports.huggingface import tidy

LENGTH = 32
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
    "type_vocab_size": 1,
}
ENCODERS = {
    "encoder-roberta": ("RobertaConfig", "eager", False, 1),
    "encoder-xlm-roberta": ("XLMRobertaConfig", "sdpa", True, 5),
}
"""By name: configuration class, attention, whether by dynamo, and the id of the padding token."""


SENTENCES = "sentence-bert"
_TEXTS = ("Yes.", "a ferry leaves the harbour", "How do I get in?", "bees", "Snow fell all night.")


class _States(torch.nn.Module):
    def __init__(self, model: transformers.PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.model(input_ids, attention_mask).last_hidden_state
        return states


def make(name: str, folder: Path) -> None:
    """Write one fixture."""
    kind, attention, dynamo, padding = ENCODERS[name]
    config = getattr(transformers, kind)(**_SIZES, pad_token_id=padding)
    model = transformers.AutoModel.from_config(config, attn_implementation=attention)
    random = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            drawn = torch.randn(weight.shape, generator=random)
            weight.copy_(drawn * 0.5 if weight.ndim > 1 else 0.2 * drawn + 1.0)
    module = _States(model).eval().requires_grad_(requires_grad=False)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ids = torch.arange(10, 17)[None]
    names = {"input_names": ["input_ids", "attention_mask"], "output_names": ["last_hidden_state"]}
    path = folder / "model.onnx"
    if dynamo:
        free = torch.export.Dim("tokens", min=2, max=LENGTH)
        sizes = {"dynamic_shapes": ({1: free}, {1: free}), "external_data": False}
        torch.onnx.export(
            module, (ids, torch.ones_like(ids)), path, dynamo=True, opset_version=18, verbose=False,
            **names, **sizes,
        )  # fmt: skip
    else:
        axes = {each: {1: "tokens"} for each in (*names["input_names"], *names["output_names"])}
        torch.onnx.export(
            module, (ids, torch.ones_like(ids)), path, dynamo=False, opset_version=17,
            dynamic_axes=axes, **names,
        )  # fmt: skip
    tidy(path)
    config.save_pretrained(folder)
    arrays = {}
    for size in (LENGTH, 9):
        text = torch.randint(padding + 1, _SIZES["vocab_size"], (1, size), generator=random)
        arrays[f"ids_{size}"] = text.numpy()
        arrays[f"states_{size}"] = module(text, torch.ones_like(text)).numpy()
    np.savez_compressed(folder / "sample.npz", **arrays)


def make_sentence_bert(folder: Path) -> None:
    """Write a folder of sentence-transformers, as its users have it, and its export."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer = _word_pieces()
    tokenizer.save(str(folder / "tokenizer.json"))
    sizes = _SIZES | {"vocab_size": tokenizer.get_vocab_size(), "type_vocab_size": 2}
    model = transformers.BertModel(transformers.BertConfig(**sizes), add_pooling_layer=False)
    random = torch.Generator().manual_seed(len(_TEXTS))
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            drawn = torch.randn(weight.shape, generator=random)
            weight.copy_(drawn * 0.5 if weight.ndim > 1 else 0.2 * drawn + 1.0)
    model.eval().save_pretrained(folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.{kind}"}
        for number, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "1_Pooling").mkdir()
    for name, values in (
        ("modules.json", modules),
        ("sentence_bert_config.json", {"max_seq_length": LENGTH, "do_lower_case": False}),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True}),
    ):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    export_worker.answer({"folder": str(folder), "out": str(folder / "model.onnx")}, {})
    tidy(folder / "model.onnx")
    tokenizer.no_padding()
    vectors = []
    with torch.no_grad():
        for text in _TEXTS:
            ids = torch.tensor([tokenizer.encode(text).ids])
            mean = model(ids).last_hidden_state[0].mean(axis=0)
            vectors.append((mean / mean.norm()).numpy())
    np.savez_compressed(folder / "sample.npz", texts=np.array(_TEXTS), vectors=np.stack(vectors))


def _word_pieces() -> Tokenizer:
    """Make a tokenizer of letters, which cuts and fills texts as those of exports do."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    pieces = [*string.ascii_lowercase, *(f"##{each}" for each in string.ascii_lowercase), ".", "?"]
    vocabulary = {token: number for number, token in enumerate([*special, *pieces])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(special)
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    return tokenizer


def main() -> None:
    """Arguments: the folder of all fixtures, then names of fixtures (all when none)."""
    for name in sys.argv[2:] or (*ENCODERS, SENTENCES):
        folder = Path(sys.argv[1]).parent / "encoders" / name
        if name == SENTENCES:
            make_sentence_bert(folder)
        else:
            make(name, folder)


if __name__ == "__main__":
    main()
