"""Measured values in words."""

from harness.cli.recorded_session import in_words, with_error


def test_a_value_has_its_label_its_error_and_its_unit() -> None:
    values = {"perplexity": 17.9661, "perplexity_error": 2.3559, "decode_tokens_per_s": 2.0}
    assert with_error("perplexity", values) == "17.966 ± 2.356"
    assert in_words({"decode_tokens_per_s": 2.0}) == "decode 2.00 tokens/s"
