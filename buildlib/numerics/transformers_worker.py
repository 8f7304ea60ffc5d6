"""Worker of `TransformersModel`, and what loads a checkpoint by torch and transformers."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buildlib.numerics.child import serve
from buildlib.toolchains.qnn.refusal import RefusedError

if TYPE_CHECKING:
    from buildlib.numerics.runners import Arrays

_loaded: Any = None
_cache: Any = None


def answer(header: dict[str, Any], arrays: "Arrays") -> "tuple[dict[str, Any], Arrays]":
    """Find or load a model; forget all tokens; or feed some, and give the logits after each."""
    global _loaded, _cache  # noqa: PLW0603  (one process, one model)
    if "folder" in header:
        folder = Path(header["folder"])
        _check_family(folder)
        if header["load"]:
            _loaded = load_model(folder, "AutoModelForCausalLM")
        return {}, {}
    if "reset" in header:
        _cache = None
        return {}, {}
    import torch

    with torch.inference_mode():
        tokens = torch.from_numpy(arrays["tokens"].astype("int64"))[None]
        output = _loaded(input_ids=tokens, past_key_values=_cache, use_cache=True)
    _cache = output.past_key_values
    return {}, {"logits": output.logits[0].float().numpy()}


def _check_family(folder: Path) -> None:
    import transformers

    name = json.loads((folder / "config.json").read_text("utf-8")).get("model_type")
    families = transformers.CONFIG_MAPPING
    if name not in families or families[name] not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise RefusedError(
            f"transformers {transformers.__version__} has no family {name!r}, and code that comes "
            "with a model is never run"
        )


def load_model(folder: Path, kind: str, unread: tuple[str, ...] = ()) -> Any:  # noqa: ANN401
    """Load a checkpoint in float32, by transformers' own code alone and from its files alone.

    Args:
        kind: of the classes of transformers.
        unread: beginnings of weights that may be missing.
    """
    import torch
    import transformers

    try:
        model, report = getattr(transformers, kind).from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise RefusedError(f"transformers cannot load it: {error}") from error
    for fault in ("missing_keys", "mismatched_keys"):
        keys = [str(key) for key in report.get(fault) or ()]
        if keys := [key for key in keys if not key.startswith(unread)]:
            # which transformers fills with random numbers
            raise RefusedError(f"transformers finds no weights for {min(keys)}")
    return model.eval()


if __name__ == "__main__":
    serve(answer)
