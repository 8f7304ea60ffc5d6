"""Exports of transformers' text encoders, which count positions over all that is no padding.

Inputs `input_ids` and `attention_mask` [batch, tokens], output `last_hidden_state`. `sample.npz`
holds texts `ids_<n>` [1, n] and what torch answers, `states_<n>` [1, n, hidden]. Run inside an
environment that has torch and transformers.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

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


def main() -> None:
    """Arguments: the folder of all fixtures, then names of fixtures (all when none)."""
    for name in sys.argv[2:] or ENCODERS:
        make(name, Path(sys.argv[1]).parent / "encoders" / name)


if __name__ == "__main__":
    main()
