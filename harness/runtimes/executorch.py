"""ExecuTorch's `qnn_llama_runner`.

Source: https://github.com/pytorch/executorch (BSD-3-Clause),
`examples/qualcomm/oss_scripts/llama/qnn_llama_runner.cpp` and its README; what it reports is
`extension/llm/runner/stats.h` (`print_report`).
"""

import json

OBSERVER = "PyTorchObserver "
"""Mark before the report of a query in the log."""


def parse_report(report: str) -> tuple[dict[str, float], float]:
    """Compute the metrics of a report as ExecuTorch's `print_report` does.

    The second value is when its process began to load the model, in seconds by its clock.

    Raises:
        ValueError: the report lacks a figure, or cannot be read.
    """
    try:
        entry = json.loads(report)
        second = float(entry["SCALING_FACTOR_UNITS_PER_SECOND"])
        begin, end = entry["inference_start_ms"], entry["inference_end_ms"]
        prefilled = entry["prompt_eval_end_ms"]
        metrics = {
            "prompt_tokens": float(entry["prompt_tokens"]),
            "generated_tokens": float(entry["generated_tokens"]),
            "init_s": (entry["model_load_end_ms"] - entry["model_load_start_ms"]) / second,
            "ttft_s": (entry["first_token_ms"] - begin) / second,
            "elapsed_s": (end - begin) / second,
        }
        start_s = float(entry["model_load_start_ms"]) / second
        spans = {
            "prefill_tokens_per_s": ("prompt_tokens", (prefilled - begin) / second),
            "decode_tokens_per_s": ("generated_tokens", (end - prefilled) / second),
        }
    except KeyError as error:
        raise ValueError(f"the report lacks {error}") from error
    except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"the report cannot be read: {error}") from error
    # Clocks of milliseconds: what took none of them has no rate.
    rates = {key: metrics[count] / span for key, (count, span) in spans.items() if span > 0}
    if metrics["ttft_s"] == 0:
        del metrics["ttft_s"]
    return {**metrics, **rates}, start_s
