"""Limits on how far a device's perplexity may be from its references on the host."""

from collections.abc import Mapping

PERPLEXITY, PERPLEXITY_FLOAT, PERPLEXITY_QUANTIZED = (
    "perplexity",
    "perplexity_float",
    "perplexity_quantized_cpu",
)
MAX_DEVIATIONS: Mapping[str, float] = {PERPLEXITY_FLOAT: 0.03, PERPLEXITY_QUANTIZED: 0.01}
"""From the same model in float, and quantized on the CPU; as parts of the reference."""
_IN_WORDS: Mapping[str, str] = {
    PERPLEXITY_FLOAT: "in float",
    PERPLEXITY_QUANTIZED: "quantized on the CPU",
}


def deviation(values: Mapping[str, float], reference: str) -> float | None:
    """Compute how far the device is from a reference, as a part of it; None if one is missing."""
    device, other = values.get(PERPLEXITY), values.get(reference)
    return None if device is None or not other else device / other - 1


def find_perplexity_faults(values: Mapping[str, float]) -> tuple[str, ...]:
    """Say in words where the device's perplexity is too far from its references."""
    found = []
    for reference, limit in MAX_DEVIATIONS.items():
        away = deviation(values, reference)
        if away is not None and abs(away) > limit:
            words = _IN_WORDS[reference]
            found.append(
                f"Perplexity on the device is {away:+.1%} from the same model {words}, "
                f"more than {limit:.0%}"
            )
    return tuple(found)


def matches_references(values: Mapping[str, float]) -> bool:
    """Whether the device's perplexity has a reference, and is near all that it has."""
    beside = any(deviation(values, reference) is not None for reference in MAX_DEVIATIONS)
    return beside and not find_perplexity_faults(values)
