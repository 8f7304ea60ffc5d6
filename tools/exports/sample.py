"""`sample.npz`: what the torch model itself answers, to check an export and its import against.

    tokens            [1, T]  the text
    logits            [1, T, vocab]  of the whole text in one forward pass without a cache
    key_<i>, value_<i>  [n_kv, T, head_dim]  of layer i, keys after the rotary embedding
    step<n>.in.<name>, step<n>.out.<name>  inputs and outputs of call n on the exported graph

The first three are independent of any export's layout. The steps are calls of the exporter's own
torch module: a prompt, then two more, each fed with the key/value cache of those before.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

Step = tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]


def whole_text(model: PreTrainedModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return logits, keys and values of one forward pass over all tokens."""
    cache = DynamicCache()
    result = model(input_ids=tokens, past_key_values=cache, use_cache=True)
    arrays = {"tokens": tokens, "logits": result.logits}
    for index, (keys, values) in enumerate(cached(cache)):
        arrays |= {f"key_{index}": keys[0], f"value_{index}": values[0]}
    return arrays


def cached(cache: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values of each layer, from a cache of any version of transformers."""
    if hasattr(cache, "layers"):
        return [(layer.keys, layer.values) for layer in cache.layers]
    return list(zip(cache.key_cache, cache.value_cache, strict=True))


def save_sample(path: Path, whole: Mapping[str, torch.Tensor], steps: list[Step]) -> None:
    """Write the file; see above for its keys."""
    arrays = dict(whole)
    for number, (inputs, outputs) in enumerate(steps):
        arrays |= {f"step{number}.in.{name}": value for name, value in inputs.items()}
        arrays |= {f"step{number}.out.{name}": value for name, value in outputs.items()}
    np.savez_compressed(path, **{name: value.numpy() for name, value in arrays.items()})


def check_steps(model_path: Path, steps: list[Step], tolerance: float = 2e-5) -> float:
    """Return the largest difference between the exported graph and the torch module.

    Raises:
        RuntimeError: it is above `tolerance`, that is, the export is wrong.
    """
    import onnxruntime as ort

    session = ort.InferenceSession(str(model_path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    known = {value.name for value in session.get_inputs()}
    worst = 0.0
    for inputs, outputs in steps:
        feed = {name: value.numpy() for name, value in inputs.items() if name in known}
        for name, value in zip(names, session.run(None, feed), strict=True):
            worst = max(worst, float(np.abs(value - outputs[name].numpy()).max()))
    if worst > tolerance:
        msg = f"{model_path}: differs from torch by {worst}"
        raise RuntimeError(msg)
    return worst
