"""Genie's profile JSON, as `genie-t2t-run --profile` writes it, to metrics.

Each event holds its figures as `{"value": ..., "unit": ...}`. The unit in the file decides, never
the name: figures without a known unit are refused. Unknown events and keys are skipped, since
releases add them. Layout: "Genie Profile", docs.qualcomm.com 80-63442-10; the figures' names were
read from files that Genie 1.21 wrote.
"""

import json
import math
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from harness.errors import RuntimeOutputError

# figure in the profile -> our metric
_METRICS = {
    "init-time": "init_s",
    "num-prompt-tokens": "prompt_tokens",
    "prompt-processing-rate": "prefill_tokens_per_s",
    "time-to-first-token": "ttft_s",
    "num-generated-tokens": "generated_tokens",
    "token-generation-rate": "decode_tokens_per_s",
    "token-acceptance-rate": "token_acceptance_rate",
}
_REQUIRED = frozenset(_METRICS.values()) - {"decode_tokens_per_s", "token_acceptance_rate"}
# unit in the profile -> factor to the unit of our metric (s, tokens, tokens/s)
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "ns": 1e-9, "toks/sec": 1.0, "tokens/s": 1.0, "": 1.0}
_UNITS["toks/iteration"] = 1.0
_UNREADABLE = (
    AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError,
)  # fmt: skip


def parse_profile(text: str, device: str) -> dict[str, float]:
    """The metrics of the last query in a profile.

    Raises:
        RuntimeOutputError: not a profile, a figure without a known unit, or one that is missing.
    """
    try:
        components = json.loads(text)["components"]
        metrics = dict(_figures(components))
    except _UNREADABLE as error:
        raise RuntimeOutputError(
            device, f"unreadable Genie profile: {error}", text[-500:]
        ) from error
    missing = _REQUIRED - metrics.keys()
    if missing:
        reason = f"the Genie profile lacks {', '.join(sorted(missing))}"
        raise RuntimeOutputError(device, reason, text[-500:])
    if metrics["generated_tokens"] < 2:  # no token came after the first: there is no decode rate
        metrics.pop("decode_tokens_per_s", None)
    return metrics


def parse_trace(text: str, device: str) -> str:
    """Return a trace that a runner wrote, on one line.

    Raises:
        RuntimeOutputError: it is no JSON document of traces.
    """
    try:
        document = json.loads(text)
        if not isinstance(document["traceEvents"], list):
            raise TypeError("it has no events")
        return json.dumps(document, separators=(",", ":"))
    except _UNREADABLE as error:
        raise RuntimeOutputError(device, f"unreadable trace: {error}", text[-500:]) from error


def _figures(components: Any) -> Iterator[tuple[str, float]]:  # noqa: ANN401  (raw JSON)
    for component in components:
        for event in component["events"]:
            for name, metric in _METRICS.items():
                if name in event:
                    yield metric, _value(name, event[name])


def _value(name: str, figure: Any) -> float:  # noqa: ANN401  (raw JSON)
    if not isinstance(figure, Mapping):
        raise TypeError(f"{name} is {reprlib.repr(figure)}, without a unit")
    unit = figure.get("unit", "")
    value = figure["value"]
    if unit not in _UNITS or isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {reprlib.repr(value)} {reprlib.repr(unit)}")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}")
    return float(value) * _UNITS[unit]
