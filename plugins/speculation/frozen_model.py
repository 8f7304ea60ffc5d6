"""A checkpoint as transformers' own model, frozen, and text that it writes itself.

Nothing here follows the builder's reading of `config.json`, but for tokens that begin a text and
for which layers have a sliding window.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.config import CheckpointConfig, other_reading
from buildlib.checkpoint.layout import CONFIG_FILE
from buildlib.checkpoint.tokenizer import load_tokenizer, text_bos
from buildlib.error_base import one_line
from buildlib.errors import InputFileError, ModelFileError

_BATCH = 64
"""Texts that are written at once."""
_FEWEST_TOKENS = 1000


@dataclass(frozen=True)
class FrozenModel:
    """A model in float32, without trained parameters.

    Attributes:
        network: the class of transformers for the family.
        config: the builder's.
        ids: of a text, `[n]`.
    """

    network: Any
    config: CheckpointConfig
    ids: Tensor

    @classmethod
    def load(cls, folder: Path, text: Path, device: str) -> "FrozenModel":
        """Read a checkpoint and a text.

        Args:
            folder: in Hugging Face layout; code in it is not run.
            text: in UTF-8.
            device: of torch, such as `cpu` or `cuda`.

        Raises:
            ModelFileError: it cannot be built, or transformers cannot load it.
            InputFileError: the text cannot be read, or has fewer than 1,000 tokens.
        """
        checkpoint = Checkpoint.load(folder)
        checkpoint.check_content()
        try:
            content = text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = "it is not UTF-8" if isinstance(error, UnicodeError) else error.strerror
            raise InputFileError(str(text), reason or "it cannot be read") from error
        tokenizer = load_tokenizer(checkpoint.tokenizer_path)
        ids = tokenizer.encode(content, add_special_tokens=False).ids
        if len(ids) < _FEWEST_TOKENS:
            reason = f"it has {len(ids)} tokens; a training needs {_FEWEST_TOKENS} and more"
            raise InputFileError(str(text), reason)
        bos = text_bos(checkpoint.tokenizer_path)
        config = checkpoint.config.model_copy(update={"bos_token_id": bos})
        network = _load_network(folder).to(device).requires_grad_(requires_grad=False)
        return cls(network, config, torch.tensor(ids))

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        device: torch.device = self.network.device
        return device

    @property
    def n_layers(self) -> int:
        """Number of decoder layers."""
        return self.config.num_hidden_layers

    @property
    def table(self) -> Tensor:
        """Embedding table as the checkpoint stores it, `[vocab, hidden]`."""
        weight: Tensor = self.network.get_input_embeddings().weight
        return weight

    def windows(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Draw windows `[count, length]` at random places of the text, led by bos if texts are."""
        starts = torch.randint(len(self.ids) - length, (count, 1), generator=generator)
        windows = self.ids[starts + torch.arange(length)]
        for token in self.config.begin:
            windows[:, 0] = token
        return windows.to(self.device)

    def continued(
        self, prompts: Tensor, n_tokens: int, report: Callable[[int], None] = lambda _: None
    ) -> Tensor:
        """Continue prompts `[n, length]` by the most probable tokens.

        Args:
            report: takes the number of texts that are done.
        """
        texts: list[Tensor] = []
        for ids in prompts.split(_BATCH):
            with torch.no_grad():
                new_texts, cache, fresh = ids, None, ids
                for _ in range(n_tokens):
                    out = self.network(
                        input_ids=fresh, past_key_values=cache, use_cache=True, logits_to_keep=1
                    )
                    cache, fresh = out.past_key_values, out.logits[:, -1:].argmax(-1)
                    new_texts = torch.cat((new_texts, fresh), dim=1)
            texts += [new_texts]
            report(sum(map(len, texts)))
        return torch.cat(texts)

    def states_and_scores(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states `[batch, length, hidden]` after the final norm, and logits."""
        with torch.no_grad():
            return states_and_scores(self.network, input_ids=ids)

    def caches(self, ids: Tensor, kept: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Return rotated keys and values of each layer `[batch, n_kv, length, head_dim]`.

        Args:
            ids: `[batch, length]`.
            kept: indices of tokens `[n]`.

        Returns:
            The caches, and logits `[batch, n, vocab]` after the tokens `kept`.
        """
        cache = transformers.DynamicCache()  # of no configuration: keeps what windows forget
        with torch.no_grad():
            out = self.network(
                input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=kept
            )
        return [(layer.keys, layer.values) for layer in cache.layers], out.logits

    def embedding_factors(self) -> tuple[float, float]:
        """Return the factors of a row of the table inside of its lookup, and after it."""
        ids = self.table.norm(dim=1).argmax().view(1, 1)  # a row of padding would be zero
        with torch.no_grad():
            row, looked_up = self.table[ids], self.network.get_input_embeddings()(ids)
            out = self.network(input_ids=ids, output_hidden_states=True, use_cache=False)
        first = out.hidden_states[0]
        return _ratio(looked_up, row), _ratio(first, looked_up)

    def masks(self, seen: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the attention mask of tokens, of each kind of layer.

        Args:
            seen: true where a token sees a key, `[tokens, keys]`; keys stand in order, so that a
                window counts those that are seen, as the builder's graphs do.
        """
        whole = additive(seen)
        layers = range(self.n_layers)
        if not any(map(self.config.has_window, layers)):
            return whole
        later = seen.flip(-1).cumsum(-1).flip(-1) - seen.long()
        near = additive(seen & (later < (self.config.sliding_window or 0)))
        if all(map(self.config.has_window, layers)) and self.config.layer_types is None:
            return near
        return {"full_attention": whole, "sliding_attention": near}


def states_and_scores(network: Any, **inputs: object) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    """Run a model of transformers; return hidden states after the final norm, and logits."""
    out = network(**inputs, output_hidden_states=True)
    return out.hidden_states[-1], out.logits


def additive(seen: Tensor) -> Tensor:
    """Return `[1, 1, tokens, keys]` that is 0 where `seen` `[tokens, keys]`, and else lowest."""
    mask = torch.zeros(seen.shape, device=seen.device)
    return mask.masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


def cache_of(layers: Sequence[tuple[Tensor, Tensor]]) -> Any:  # noqa: ANN401
    """Return a cache of transformers with keys and values by layer."""
    cache = transformers.DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


def _load_network(folder: Path) -> Any:  # noqa: ANN401
    version = transformers.__version__
    difference = other_reading(folder / CONFIG_FILE, int(version.partition(".")[0]))
    if difference is not None:
        reason = f"its {CONFIG_FILE} is of another major release than transformers {version}"
        raise ModelFileError(folder, f"{reason}, which reads it differently: {difference}")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",  # the others leave soft-capping out
            local_files_only=True,
            trust_remote_code=False,
        ).eval()
    except Exception as error:  # of any kind, by the version and the family
        reason = f"transformers {version} cannot load it: {error}"
        raise ModelFileError(folder, one_line(reason, 400)) from error


def _ratio(one: Tensor, other: Tensor) -> float:
    return float(one.norm() / other.norm())
