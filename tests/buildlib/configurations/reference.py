"""What transformers computes for a `config.json`: a child process in any environment that has it.

    PYTHON tests/buildlib/configurations/reference.py

reads lines `{"folder": ..., "tokens": [...]}` and answers each with a line: the
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


def random_tensor(name: str, shape: Sequence[int], spread: float = 0.3) -> Floats:
    """Return the weights of one tensor, which follow from its name and shape.

    They are larger than start values: with those attention is close to uniform and the residual
    stream close to the embedding, so that many mistakes do not show.

    Args:
        spread: of the gains of norms around 1.
    """
    values = np.random.default_rng(zlib.crc32(name.encode())).normal(size=tuple(shape))
    if name.endswith("bias"):
        values *= 0.3
    elif len(shape) == 1:
        values = 1.0 + spread * values
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


def answer(folder: Path, tokens: Sequence[int]) -> dict[str, Any]:
    """Compute the logits [n, vocab] of the configuration in a folder, in one call."""
    import torch
    import transformers

    try:
        model = make_model(transformers.AutoConfig.from_pretrained(folder))
        with torch.no_grad():
            logits = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
    except Exception as error:  # noqa: BLE001  (whatever transformers or torch raise)
        return {"raised": f"{type(error).__name__}: {error}"[:300]}
    if not np.isfinite(logits).all():
        return {"raised": "logits that are not finite"}
    np.save(folder / "logits.npy", logits)
    return {"shapes": {name: list(weight.shape) for name, weight in model.named_parameters()}}


def main() -> None:
    """Answer the lines of standard input."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity(50)
    print(json.dumps({"transformers": transformers.__version__}), flush=True)  # noqa: T201
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(answer(Path(asked["folder"]), asked["tokens"])), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
