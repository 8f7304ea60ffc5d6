"""Worker of `ExportEncoder`: a checkpoint of an encoder as ONNX, by torch and transformers."""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buildlib.numerics.child import serve
from buildlib.numerics.transformers_worker import load_model
from buildlib.toolchains.qnn.refusal import RefusedError

if TYPE_CHECKING:
    from buildlib.numerics.runners import Arrays

_OPSET = 17
_NAMES = ("input_ids", "attention_mask", "token_type_ids")
_HIDDEN = "last_hidden_state"
_UNREAD = ("pooler.",)
"""Weights of the output that sentences are not made of, which many checkpoints lack."""
_TOKENS = 16  # of the text that is traced


def answer(header: dict[str, Any], arrays: "Arrays") -> "tuple[dict[str, Any], Arrays]":
    """Export the checkpoint in `folder` to the file `out`, for texts of any length."""
    del arrays
    _export(load_model(Path(header["folder"]), "AutoModel", _UNREAD), header["out"])
    return {}, {}


def _export(model: Any, path: str) -> None:  # noqa: ANN401  (a module of torch)
    import torch

    names = [name for name in _NAMES if _takes(model, name)]

    class States(torch.nn.Module):  # type: ignore[misc]  # (torch is not here)
        """The model from its inputs, in order, to its hidden states."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *values: torch.Tensor) -> Any:  # noqa: ANN401
            return self.model(**dict(zip(names, values, strict=True))).last_hidden_state

    largest = model.config.vocab_size
    ids = torch.arange(largest // 2, largest // 2 + _TOKENS)[None] % largest
    values = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
    }
    try:
        # The exporter of torch.export writes the same graph in more time, and needs onnxscript.
        with torch.inference_mode():
            torch.onnx.export(
                States().eval(),
                tuple(values[name] for name in names),
                path,
                dynamo=False,
                opset_version=_OPSET,
                input_names=names,
                output_names=[_HIDDEN],
                dynamic_axes={name: {1: "tokens"} for name in (*names, _HIDDEN)},
            )
    except Exception as error:
        raise RefusedError(f"torch cannot export it: {error}") from error


def _takes(model: Any, name: str) -> bool:  # noqa: ANN401
    """Return whether an input decides anything."""
    if name not in inspect.signature(model.forward).parameters:
        return False
    return name != "token_type_ids" or (getattr(model.config, "type_vocab_size", 0) or 0) > 1


if __name__ == "__main__":
    serve(answer)
