"""Registry of metrics: unit, legal range, and direction of better.

A metric's key names its unit, so that a bare number in a query or a JSON file cannot be misread.
Keys that are not registered are refused: a misspelt metric would otherwise be a silent gap in every
report.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from harness.errors import MetricError

_MIB = 2.0**20
_HUNDRED, _THOUSAND = 100.0, 1000.0
_DAY_S = 86_400.0
_MAX_BYTES = 2.0**50
_MAX_TOKENS = 2.0**31


class Direction(StrEnum):
    """The direction in which a metric gets better."""

    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = "neither"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, and how its values are shown.

    Attributes:
        key: its name in the store, with the unit: `ttft_s`.
        unit: the unit of stored values.
        shown_unit: the unit of values as people read them, `shown = stored * scale`; empty for pure
            numbers.
        decimals: of values below 100; larger ones are shown with fewer.
        positive: whether 0 is refused: a rate of 0 tokens/s is a failure, not a speed.
        integral: whether only whole numbers are legal.
    """

    key: str
    label: str
    unit: str
    direction: Direction
    shown_unit: str
    decimals: int
    scale: float = 1.0
    minimum: float = 0.0
    maximum: float = math.inf
    positive: bool = False
    integral: bool = False

    def check(self, value: float) -> float:
        """Return the value if it is legal.

        Raises:
            MetricError: it is not finite, out of range, or a fraction of something counted
                in whole numbers.
        """
        legal = (
            math.isfinite(value)
            and self.minimum <= value <= self.maximum
            and not (self.positive and value == 0)
            and not (self.integral and value != int(value))
        )
        if not legal:
            raise MetricError(f"{self.key} cannot be {value:g}: legal is {self.legal_range}")
        return float(value)

    def gain(self, ratio: float) -> float:
        """Return a change for the better as a part of what was before; below 0 for the worse.

        Args:
            ratio: now over before.
        """
        return ratio - 1 if self.direction is Direction.HIGHER else 1 - ratio

    @property
    def legal_range(self) -> str:
        """The legal values in words."""
        kind = "a whole number" if self.integral else "a number"
        low = "above 0" if self.positive and self.minimum == 0 else f"from {self.minimum:g}"
        return f"{kind} {low} to {self.maximum:g} ({self.unit})"

    def format(self, value: float, *, beside: float | None = None) -> str:
        """Format a value in `shown_unit`, without naming the unit: for cells whose heading does.

        Args:
            value: in `unit`.
            beside: the value that sets the number of decimals, for a deviation beside its mean.
        """
        size = abs((value if beside is None else beside) * self.scale)
        decimals = self.decimals - (size >= _HUNDRED) - (size >= _THOUSAND)
        return f"{value * self.scale:,.{max(decimals, 0)}f}"

    def show(self, value: float) -> str:
        """Format a value with its unit: `17.2 tokens/s`, `1 token`, `2 tokens`."""
        one = value == 1 and self.integral and self.shown_unit == self.unit
        unit = self.shown_unit.removesuffix("s") if one else self.shown_unit
        return f"{self.format(value)} {unit}".rstrip()


def unknown_metric(key: str, known: Iterable[str]) -> MetricError:
    """Return the error of a key that is not registered."""
    return MetricError(f"unknown metric {key!r}: known are {', '.join(known)}")


def find_metric(key: str) -> Metric:
    """Look up a metric by its key.

    Raises:
        MetricError: no metric has this key.
    """
    try:
        return METRICS[key]
    except KeyError:
        raise unknown_metric(key, METRICS) from None


def find_key(text: str, known: Collection[str] | None = None) -> str:
    """Find the key of a metric by its beginning: `decode` is `decode_tokens_per_s`.

    Args:
        known: the keys among which it is; by default all.

    Raises:
        MetricError: none or several begin so.
    """
    keys = METRICS if known is None else known
    found = [key for key in keys if text and key.startswith(text)]
    if text in keys:
        return text
    if len(found) != 1:
        raise unknown_metric(text, found or keys)
    return found[0]


def _rate(key: str, label: str) -> Metric:
    return Metric(
        key, label, "tokens/s", Direction.HIGHER, "tokens/s", 2, maximum=1e7, positive=True
    )


def _seconds(key: str, label: str) -> Metric:
    return Metric(key, label, "s", Direction.LOWER, "s", 3, maximum=_DAY_S)


def _milliseconds(key: str, label: str, decimals: int) -> Metric:
    return Metric(
        key,
        label,
        "s",
        Direction.LOWER,
        "ms",
        decimals,
        scale=_THOUSAND,
        maximum=_DAY_S,
        positive=True,
    )


def _bytes(key: str, label: str, *, positive: bool = False) -> Metric:
    return Metric(
        key,
        label,
        "bytes",
        Direction.LOWER,
        "MiB",
        1,
        scale=1 / _MIB,
        maximum=_MAX_BYTES,
        positive=positive,
        integral=True,
    )


def _count(key: str, label: str, unit: str) -> Metric:
    return Metric(key, label, unit, Direction.NEITHER, unit, 0, maximum=_MAX_TOKENS, integral=True)


def _share(key: str, label: str, direction: Direction = Direction.HIGHER) -> Metric:
    return Metric(key, label, "", direction, "%", 1, scale=_HUNDRED, maximum=1.0)


def _shares(key: str, label: str) -> tuple[Metric, Metric]:
    """Return a share and its standard error."""
    error = f"Standard error of {label[0].lower()}{label[1:]}"
    return _share(key, label), _share(f"{key}_error", error, Direction.NEITHER)


def _perplexity(key: str, label: str) -> Metric:
    # exp of a mean negative log-likelihood, which is never below 0.
    return Metric(key, label, "", Direction.LOWER, "", 3, minimum=1.0, maximum=1e12)


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        metric.key: metric
        for metric in (
            _rate("prefill_tokens_per_s", "Prefill"),
            _rate("decode_tokens_per_s", "Decode"),
            _milliseconds("ttft_s", "Time to first token", 1),
            _rate("total_tokens_per_s", "Prompt and answer"),
            _seconds("init_s", "Init"),
            _seconds("first_load_s", "First load"),
            _milliseconds("inference_s", "Inference", 2),
            _seconds("elapsed_s", "Elapsed"),
            _milliseconds("embed_s", "Embedding", 1),
            Metric(
                "cosine_float",
                "Cosine with float",
                "",
                Direction.HIGHER,
                "",
                4,
                minimum=-1.0,
                maximum=1.0,
            ),
            _count("prompt_tokens", "Prompt", "tokens"),
            _count("generated_tokens", "Generated", "tokens"),
            # Of speculative decoding: tokens that one call of the target gives, 1 without a draft.
            Metric(
                "token_acceptance_rate",
                "Tokens accepted per call",
                "",
                Direction.HIGHER,
                "",
                2,
                maximum=1e4,
            ),
            _count("differing_texts", "Texts unlike plain decoding's", "texts"),
            _bytes("peak_rss_bytes", "Peak memory", positive=True),
            _bytes("peak_anonymous_bytes", "Peak anonymous memory", positive=True),
            _bytes("peak_file_bytes", "Peak file pages", positive=True),
            _bytes("inference_peak_bytes", "Peak memory of inference"),
            _perplexity("perplexity", "Perplexity on device"),
            Metric(
                "perplexity_error",
                "Standard error of perplexity",
                "",
                Direction.NEITHER,
                "",
                3,
                maximum=1e15,
            ),
            _perplexity("perplexity_float", "Perplexity, float on host"),
            _perplexity("perplexity_quantized_cpu", "Perplexity, quantized on CPU"),
            Metric(
                "kl_divergence",
                "KL divergence from float",
                "nats",
                Direction.LOWER,
                "nats",
                5,
                maximum=1e6,
            ),
            Metric(
                "top1_agreement",
                "Same most probable token as float",
                "",
                Direction.HIGHER,
                "%",
                2,
                scale=100.0,
                maximum=1.0,
            ),
            *_shares("accuracy", "Accuracy"),
            *_shares("accuracy_norm", "Accuracy by byte"),
            _share("accuracy_float", "Accuracy, float on host"),
            _share("accuracy_norm_float", "Accuracy by byte, float on host"),
            _share("choice_agreement", "Same choice as float"),
            *_shares("prompts_strict", "Prompts followed"),
            *_shares("prompts_loose", "Prompts followed, loosely"),
            *_shares("instructions_strict", "Instructions followed"),
            *_shares("instructions_loose", "Instructions followed, loosely"),
            _seconds("push_s", "Push"),
            _bytes("push_bytes", "Pushed"),
            _bytes("reused_bytes", "Already on the device"),
            _count("push_files", "Files pushed", "files"),
            _count("reused_files", "Files already on the device", "files"),
        )
    }
)
"""Every metric by its key, in the order in which reports show them."""
