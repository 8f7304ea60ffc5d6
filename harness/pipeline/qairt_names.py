"""The vendor's module names of the pipeline, offered by `buildlib.qairt_modules`."""

from collections.abc import Mapping
from types import MappingProxyType

_BASES = "qairt.experimental.pipeline.torch.common.bases"

NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "qairt.api.configs.device": {"Device": "harness.devices.spec:DeviceSpec"},
        "qairt.experimental.pipeline.torch.llm.pipeline": {
            "LLMPipeline": "harness.pipeline.llm",
            "LLMPipelineConfig": "harness.pipeline.recipe",
        },
        "qairt.experimental.pipeline.torch.common.recipe": {"Recipe": "harness.pipeline.recipe"},
        f"{_BASES}.stage": dict.fromkeys(
            ("Stage", "StageConfig", "StageInput", "StageOutput"), "harness.pipeline.stage"
        ),
        f"{_BASES}.stage_registry": {
            "StageRegistry": "harness.pipeline.registry",
            "register_stage": "harness.pipeline.registry",
        },
        f"{_BASES}.stage_observer": {
            "StageObserver": "harness.pipeline.observers",
            "StageProfilerObserver": "harness.pipeline.observers:StageProfiler",
        },
    }
)
