"""Adapters applied by the real Genie."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from buildlib.builder.lora_config import LoraSet
from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.tokenizer import load_tokenizer, spread_windows
from buildlib.container.genie_validator import check_genie_text
from buildlib.encodings.files import save_encodings
from buildlib.graph.files import load_model
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner
from plugins.lora.adapters import Adapters
from plugins.lora.branches import LoraBranches
from plugins.lora.calibration import calibrate_adapters
from plugins.lora.projections import find_projections
from tests.buildlib.dialogs.genie_lab import SHAPES, GenieLab

RED = {
    "self_attn.q_proj": (40, 72),
    "self_attn.v_proj": (40, 24),
    "self_attn.o_proj": (72, 40),
    "mlp.down_proj": (72, 40),
}
BLUE = {
    "self_attn.q_proj": (40, 72),
    "self_attn.k_proj": (40, 24),
    "self_attn.v_proj": (40, 24),
    "mlp.gate_proj": (40, 72),
    "mlp.up_proj": (40, 72),
}
ALPHA = "lora_alpha"

NEAR = 0.3
"""Logits apart of tokens that quantization may exchange."""


@pytest.mark.genie_configuration("LoRA v1")
def test_genie_speaks_as_the_adapted_float_model(
    genie_lab: GenieLab, tiny_text: str, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    red = make_adapter(tmp_path / "red", RED, rank=8, seed=1)
    blue = make_adapter(tmp_path / "blue", BLUE, rank=4, seed=2)
    description = {
        "adapters": [{"name": "red", "path": red.name}, {"name": "blue", "path": blue.name}],
        "use_cases": [{"name": "purple", "adapters": {"red": 0.5, "blue": 0.5}}],
    }
    (tmp_path / "lora.json").write_text(json.dumps(description))
    source, model = genie_lab.export / "model.onnx", tmp_path / "adapted.onnx"
    lora = LoraSet.load(tmp_path / "lora.json")
    adapters = Adapters.load(lora, find_projections(load_model(source)))
    LoraBranches(adapters.branches, ALPHA).run(source, model)

    config = load_config(genie_lab.export / "config.json")
    tokenizer = load_tokenizer(genie_lab.export / "tokenizer.json")
    tokens = tokenizer.encode(tiny_text, add_special_tokens=False).ids
    windows = spread_windows(tokens, 96, 1, config.bos_token_id)
    encodings = calibrate_adapters(model, adapters, ALPHA, config, windows).encodings
    save_encodings(encodings, model.with_suffix(".encodings"))

    dialog = genie_lab.compile(model, tmp_path).with_lora(adapters.genie(ALPHA))
    check_genie_text(dialog.to_json().encode(), "genie_config.json")
    adapters.write(tmp_path)
    assert "lora/purple" in dialog.referenced_files

    plain = genie_lab.ask(tmp_path, dialog)
    adapted = genie_lab.ask(tmp_path, dialog, "-l", f"purple,{ALPHA},1")
    assert adapted != plain
    chain = {shape.ar: [OnnxRunner(tmp_path / f"{shape}.onnx")] for shape in SHAPES}
    constants = {**adapters.tensors("purple"), ALPHA: np.ones(1, np.float32)}
    count = genie_lab.n_tokens
    fed = tokenizer.encode(genie_lab.prompt + adapted, add_special_tokens=False).ids
    with HostLoop(chain, config, constants=constants) as loop:
        logits = loop.feed([0, *fed])[-1 - count : -1]  # Genie begins with BOS
    said = logits[range(count), fed[-count:]]
    assert (logits.max(1) - said < NEAR).all()
    # Before anything is applied the branches add nothing.
    assert plain == genie_lab.ask(tmp_path, dialog, "-l", f"purple,{ALPHA},0")
