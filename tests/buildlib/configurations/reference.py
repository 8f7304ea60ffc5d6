"""What transformers computes for a `config.json`: a child process in any environment that has it.

    PYTHON tests/buildlib/configurations/reference.py

reads lines `{"folder": ..., "tokens": [...], "n_prefill": ...}` and answers each with a line: the
shapes of the model's parameters, or what transformers raised. Logits go to `FOLDER/logits.npy`. It
imports torch, transformers and numpy only, so that an environment without this project can run it.
"""

import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def random_tensor(name: str, shape: Sequence[int]) -> Floats:
    """Return the weights of one tensor, which follow from its name and shape.

    They are larger than start values: with those attention is close to uniform and the residual
    stream close to the embedding, so that many mistakes do not show. Gains of norms are random too.
    """
    values = np.random.default_rng(zlib.crc32(name.encode())).normal(size=tuple(shape))
    if name.endswith("bias"):
        values *= 0.3
    elif len(shape) == 1:
        values = 1.0 + 0.3 * values
    else:
        values *= 0.5 if "embed" in name else 1.2 / np.sqrt(shape[1])
    return values.astype(np.float32)


def make_model(config: Any) -> Any:  # noqa: ANN401
    """Return transformers' model of a configuration, with `random_tensor` as its parameters."""
    import torch
    import transformers

    if config.hidden_size * max(config.intermediate_size, config.vocab_size) > 1 << 20:
        msg = "the model is too large to be compared"
        raise MemoryError(msg)
    # What the file says of types would round factors such as Gemma's of its embedding.
    settings = {"attn_implementation": "eager", "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_config(config, **settings).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.from_numpy(random_tensor(name, tuple(weight.shape))))
    return model


def logits_of(model: Any, tokens: Sequence[int], n_prefill: int) -> tuple[Floats, Floats]:  # noqa: ANN401
    """Return logits [n, vocab] of one call over all tokens, and of a prefill and single steps."""
    import torch

    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits[0]
        output = model(ids[:, :n_prefill], use_cache=True)
        steps = [output.logits[0]]
        for position in range(n_prefill, len(tokens)):
            step = ids[:, position : position + 1]
            output = model(step, past_key_values=output.past_key_values, use_cache=True)
            steps.append(output.logits[0])
    return whole.numpy(), torch.cat(steps).numpy()


def answer(folder: Path, tokens: Sequence[int], n_prefill: int) -> dict[str, Any]:
    """Compute the logits of the configuration in a folder."""
    import transformers

    try:
        model = make_model(transformers.AutoConfig.from_pretrained(folder))
        whole, steps = logits_of(model, tokens, n_prefill)
    except Exception as error:  # noqa: BLE001  (whatever transformers or torch raise)
        return {"raised": f"{type(error).__name__}: {error}"[:300]}
    if not np.isfinite(whole).all():
        return {"raised": "logits that are not finite"}
    shapes = {name: list(weight.shape) for name, weight in model.named_parameters()}
    np.save(folder / "logits.npy", whole)
    apart = float(np.abs(whole - steps).max() / np.abs(whole).max())
    return {"shapes": shapes, "cache_apart": apart}


def main() -> None:
    """Answer the lines of standard input."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity(50)
    sys.stdout.write(json.dumps({"transformers": transformers.__version__}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        told = answer(Path(asked["folder"]), asked["tokens"], asked["n_prefill"])
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
