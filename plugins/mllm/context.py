"""Contexts of `.mllm` files: the file's model, compiled in mllm's contract."""

import re
from dataclasses import dataclass
from pathlib import Path

from buildlib.builder.build import Build, Sources
from buildlib.builder.build_options import BuildOptions
from buildlib.builder.options import ARnContextLengthConfig, SplitModelConfig
from buildlib.builder.plan import BuildPlan
from buildlib.builder.runner import OnStage, StageRunner
from buildlib.builder.sources import OnnxSource
from buildlib.cache.store import StageCache
from buildlib.checkpoint.layout import CONFIG_FILE, GENERATION_FILE, MODEL_FILE, TOKENIZER_FILE
from buildlib.container.chat_template import ChatTemplate
from buildlib.errors import InputFileError
from buildlib.files import check_file
from buildlib.graph.shape import GraphShape
from buildlib.targets import Target, catalog, find_soc
from buildlib.toolchains.base import Toolchain
from buildlib.toolchains.compile_config import CompileConfig
from plugins.mllm.apply_contract import MLLM
from plugins.mllm.config import AotConfig, ModelConfig, chipset_of
from plugins.mllm.contents import check_contents
from plugins.mllm.import_mllm import ImportMllm
from plugins.mllm.parameter_file import read_parameters

_ON_QNN = {"graph_on_qnn": ("model",), "op_on_qnn": ("lm_head",)}


@dataclass(frozen=True)
class MllmFiles:
    """A `.mllm` file with its configurations and its tokenizer.

    Attributes:
        parameters: the file.
        config: of `config_file`, `config_X.json`.
        aot: of `aot_file`, `qnn_aot_cfg_X.json`.
        tokenizer: `tokenizer.json`, which containers need.
    """

    parameters: Path
    config_file: Path
    config: ModelConfig
    aot_file: Path
    aot: AotConfig
    tokenizer: Path

    def target(self, *, emulator: bool = False) -> Target:
        """Return the SoC of the target machine, or its emulator."""
        chipset = self.aot.target_machine.htp_chipset
        soc = next((soc for soc in catalog() if chipset_of(soc) == chipset), None)
        return Target(soc or find_soc(chipset), emulator=emulator)

    def compile_config(self, target: Target) -> CompileConfig:
        """Return the compiler's options, and the speed that devices run the context at.

        Raises:
            InputFileError: the file asks for what mllm's own compiler does alone.
        """
        for key, own in _ON_QNN.items():
            given = getattr(self.aot, key)
            if given != own:
                reason = f"/{key} is {list(given)}: model and head run on QNN here, {list(own)}"
                raise InputFileError(str(self.aot_file), reason)
        machine = self.aot.target_machine
        profile = machine.htp_try_best_performance.removeprefix("Htp")
        return CompileConfig.for_target(target).with_options(
            {
                "graphs.vtcm_size_in_mb": machine.htp_vtcm_capability_in_mb,
                "devices.pd_session": machine.htp_security_pd_session.removeprefix("Htp")
                .removesuffix("Pd")
                .lower(),
                "devices.cores.perf_profile": re.sub(r"\B([A-Z])", r"_\1", profile).lower(),
            }
        )


def plan_context(
    files: MllmFiles,
    name: str,
    ar: int,
    target: Target,
    cache_root: Path,
    toolchain: Toolchain,
    *,
    on_stage: OnStage | None = None,
) -> Build:
    """Import a `.mllm` file, and return the build of its container.

    Args:
        files: checked against each other.
        name: of the model, and of its context binary.
        ar: tokens of a prefill call; the other graph decodes.
        target: SoC, or its emulator.
        cache_root: of the stages.
        toolchain: compiles.
        on_stage: told of the import.
    """
    check_file(files.tokenizer)
    file = read_parameters(files.parameters)
    check_contents(file.path, file.tensors, files.config, files.aot)
    shape = GraphShape(ar, files.config.max_cache_length)
    shapes = ARnContextLengthConfig(
        auto_regression_number=tuple(sorted({1, ar})), context_length=(shape.cl,)
    )
    plan = BuildPlan(
        BuildOptions(arn_cl_options=shapes, split_model=SplitModelConfig(num_splits=1)),
        files.compile_config(target),
        contract=MLLM,
    ).checked()
    toolchain.check(plan.compilation)
    with StageCache(cache_root, name) as cache:
        runner = StageRunner(toolchain, cache, cache_root, on_stage)
        generation = files.tokenizer.with_name(GENERATION_FILE)
        paths = (files.parameters, files.config_file, files.aot_file, files.tokenizer, generation)
        hashes = runner.watch.hash({path.name: path for path in paths if path.is_file()})
        stage = ImportMllm(file, files.config, files.aot, files.tokenizer, hashes, shape)
        entry = runner.run(stage)
    source = OnnxSource(
        name=name,
        model=entry.folder / MODEL_FILE,
        encodings=None,
        config=(entry.folder / CONFIG_FILE).read_text(encoding="utf-8"),
        config_file=files.config_file,
        tokenizer=entry.folder / TOKENIZER_FILE,
        calibration_text=None,
        chat_template=ChatTemplate.find(files.tokenizer.parent),
        canonical=entry,
    )
    return Build(Sources(source), plan, cache_root, toolchain)
