"""Readers of AI Hub's results: profiles of jobs, and figures of the models that it publishes.

Sources:
    Profiles: `ProfileJob.download_profile` of the qai-hub client,
        https://workbench.aihub.qualcomm.com/docs; times are in microseconds, memory in bytes.
    Models: `qai_hub_models/models/*/perf.yaml` of https://github.com/qualcomm/ai-hub-models
        (BSD-3-Clause). Until 2025 a list of models with devices beneath, in microseconds and bytes;
        then `precisions`, in the units that its keys name, where models of language have a list by
        context length from the end of 2025 on.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import Any

from pydantic import BaseModel, ConfigDict

from harness.errors import ConfigFileError
from harness.importing.json_files import canonical, of_entries
from harness.importing.records import Entries, FileFormat, ForeignRun, UnreadableError
from harness.runtimes.json_values import UNREADABLE, Entry, number
from harness.yaml_files import MAX_BYTES, YamlFile

_MOST_RESULTS = 10_000


def read_profile(line: int, entry: Entry) -> Iterator[ForeignRun]:
    """Read the profile of an AI Hub job: times of one call of the model, and memory."""
    summary = entry["execution_summary"]
    times = summary.get("all_inference_times") or [summary["estimated_inference_time"]]
    once = {
        "first_load_s": ("first_load_time", 1e-6),
        "init_s": ("warm_load_time", 1e-6),
        "inference_peak_bytes": ("estimated_inference_peak_memory", 1.0),
    }
    units = Counter(str(each["compute_unit"]) for each in entry.get("execution_detail", ()))
    yield ForeignRun(
        line,
        "AI Hub",
        source=canonical(entry),
        settings={f"layers on {unit}": count for unit, count in sorted(units.items())},
        repetitions=[{"inference_s": number(each) * 1e-6} for each in times],
        session={
            metric: number(summary[key]) * scale
            for metric, (key, scale) in once.items()
            if summary.get(key) is not None
        },
    )


class _PublishedModel(BaseModel):
    """A `perf.yaml`, of which only the outermost keys are known to all versions."""

    model_config = ConfigDict(extra="allow")

    precisions: dict[str, Any] = {}
    models: list[Any] | dict[str, Any] = []


def read_models(text: str) -> Entries:
    """Read what a `perf.yaml` tells of each model, precision, device and runtime."""
    if len(text) > MAX_BYTES:
        raise UnreadableError(1, "it is larger than 1 MiB")
    try:
        file = YamlFile("perf.yaml", text, _PublishedModel)
    except ConfigFileError as error:
        raise UnreadableError(error.line or 1, error.reason) from error
    try:
        for place, facts in islice(_results(file.content), _MOST_RESULTS):
            yield file.error(place, "").line or 1, facts
    except UNREADABLE as error:
        raise UnreadableError(1, f"its models are not as AI Hub publishes them: {error}") from error


def _results(content: _PublishedModel) -> Iterator[tuple[tuple[str | int, ...], Entry]]:
    """Yield the place of each result, and facts about it: `figures` and what they are of."""
    for precision, details in content.precisions.items():
        for model, component in details["components"].items():
            for device, runtimes in (component.get("performance_metrics") or {}).items():
                place = ("precisions", precision, "components", model, "performance_metrics")
                facts = {"model": model, "device": device, "precision": precision}
                for runtime, figures in runtimes.items():
                    told = {**facts, "runtime": runtime, "figures": figures}
                    yield (*place, device, runtime), told
    listed = isinstance(content.models, list)
    for index, model in enumerate(content.models if listed else [content.models]):
        for place_, runtimes in enumerate(model.get("performance_metrics") or ()):
            about = runtimes["reference_device_info"]
            device = ", ".join(about[key] for key in ("name", "chipset") if about.get(key))
            facts = {"model": model["name"], "device": device, "time": runtimes.get("timestamp")}
            for runtime, figures in runtimes.items():
                if runtime not in {"reference_device_info", "timestamp"}:
                    inside = (index,) if listed else ()
                    told = {**facts, "runtime": runtime, "figures": figures}
                    yield ("models", *inside, "performance_metrics", place_, runtime), told


_NONE = (None, "null")
_FIGURES = {
    "tokens_per_second": ("decode_tokens_per_s", None, 1.0),
    "prefill_tokens_per_second": ("prefill_tokens_per_s", None, 1.0),
    "time_to_first_token_range": ("ttft_s", "min", 1e-6),
    "time_to_first_token_range_milliseconds": ("ttft_s", "min", 1e-3),
    "inference_time": ("inference_s", None, 1e-6),
    "inference_time_milliseconds": ("inference_s", None, 1e-3),
    "estimated_peak_memory_range": ("inference_peak_bytes", "max", 1.0),
    "estimated_peak_memory_range_mb": ("inference_peak_bytes", "max", 2.0**20),
}
"""Metrics by key, with the end of a range: the longest time to first token was not measured."""


def read_published(line: int, entry: Entry) -> Iterator[ForeignRun]:
    """Read one result of a `perf.yaml`: a run for each context length; of a failed job none."""
    of_model: Mapping[str, Any] = entry["figures"]
    by_length = of_model.get("llm_metrics") or [of_model]
    for told in by_length if isinstance(by_length, list) else [by_length]:
        values = {key: value for key, value in told.items() if value not in _NONE}
        figures = {
            metric: number(values[key] if end is None else values[key][end]) * scale
            for key, (metric, end, scale) in _FIGURES.items()
            if key in values
        }
        if not any(figures.values()):
            continue
        layers = of_model.get("layer_counts") or of_model.get("layer_info") or {}
        counts = {
            unit: int(layers.get(unit.lower(), layers.get(f"layers_on_{unit.lower()}", 0)))
            for unit in ("CPU", "GPU", "NPU")
        }
        unit = told.get("desired_compute_unit") or told.get("primary_compute_unit") or "NPU"
        about = {"context_length": told.get("context_length"), "compute_unit": str(unit).upper()}
        yield ForeignRun(
            line,
            str(entry["runtime"]),
            source=canonical({**entry, "figures": told, "time": str(entry.get("time"))}),
            model=str(entry["model"]),
            precision=str(entry.get("precision") or of_model.get("precision") or "") or None,
            device_model=str(entry["device"]),
            created_at=_moment(entry.get("time")),
            settings={key: value for key, value in about.items() if value is not None}
            | {f"layers on {unit}": count for unit, count in counts.items() if count},
            versions={k: str(v) for k, v in (of_model.get("tool_versions") or {}).items()},
            repetitions=[figures],
        )


def _moment(timestamp: object) -> datetime | None:
    if timestamp is None or isinstance(timestamp, datetime):
        return timestamp
    return datetime.fromisoformat(str(timestamp))


FORMATS = (
    FileFormat('"execution_summary"', of_entries(read_profile)),
    FileFormat("^ *performance_metrics:", of_entries(read_published, read_models)),
)
