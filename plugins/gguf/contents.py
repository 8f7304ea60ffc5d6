"""Print a GGUF for `qnnfarm inspect`."""

from buildlib.checkpoint.config import check_checkpoint_config
from buildlib.errors import InputFileError, ModelFileError
from buildlib.gguf import GgufHeader
from buildlib.sizes import size_text
from buildlib.toolchains.base import TensorInfo
from harness.cli.tensors import print_facts, print_shapes
from harness.console import answers, print_json
from plugins.gguf.config import Metadata, read_config
from plugins.gguf.tokenizer import GgufTokenizer


def print_model(header: GgufHeader, *, every: bool, json: bool) -> None:
    """Print model, types, tokenizer and template of a GGUF, and whether it builds."""
    keys, architecture = header.keys, header.architecture
    sizes = {
        key.removeprefix(f"{architecture}."): value
        for key, value in keys.items()
        if key.startswith(f"{architecture}.")
    }
    tokens = header.arrays.get("tokenizer.ggml.tokens")
    tokenizer = [str(keys.get(f"tokenizer.ggml.{key}", "")) for key in ("model", "pre")]
    template = keys.get("tokenizer.chat_template")
    n_bytes = header.path.stat().st_size
    config: dict[str, object] = {}
    refused = None
    try:
        model = Metadata(header)
        config = read_config(model) | GgufTokenizer(model).special_ids
        check_checkpoint_config(config, header.path)
    except (InputFileError, ModelFileError) as error:
        refused = error.reason
    infos = [TensorInfo(n, t.shape[::-1], t.type_name, None) for n, t in header.tensors.items()]
    if json:
        about = {
            "name": header.name, "architecture": architecture, "size_bytes": n_bytes,
            "parameters": header.parameters, "types": header.types, "sizes": sizes,
            "context_length": header.context_length, "tokenizer": tokenizer,
            "tokens": 0 if tokens is None else tokens.count, "chat_template": template,
            "refused": refused, "config": config,
            "tensors": [{"name": t.name, "shape": t.shape, "dtype": t.dtype} for t in infos],
        }  # fmt: skip
        print_json({"gguf": about})
        return
    shares = (f"{n / max(1, header.parameters):.1%} {kind}" for kind, n in header.types.items())
    facts: dict[str, object] = {
        "model": header.name or "unnamed",
        "architecture": architecture or "none",
        "builds": f"as {config['model_type']}" if refused is None else f"no: {refused}",
        "size": size_text(n_bytes),
        "weights": f"{header.parameters:,}: {', '.join(shares)}",
        **sizes,
        "tokenizer": f"{', '.join(filter(None, tokenizer)) or 'none'}"
        + ("" if tokens is None else f", {tokens.count:,} tokens"),
        **{key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config},
        "chat template": "none" if template is None else "yes",
    }
    print_facts(answers(), facts)
    print_shapes(infos, every=every)
