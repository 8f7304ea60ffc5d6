"""The documented snippets, run as they stand; what they presuppose is given to them.

Texts: "Gen AI Builder Overview" and "Advanced Features", docs.qualcomm.com 80-87189-2.
"""

import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from types import EllipsisType
from typing import Any

import pytest

from buildlib.builder.lora_config import LoraSet
from buildlib.builder.options import M2sStartPoint
from buildlib.builder.speculative_config import LadeBuilderConfig
from buildlib.cache.layout import SIDECAR as RECORD
from buildlib.cache.records import read_files
from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.container.container import GenAIContainer
from buildlib.errors import CacheError, ContainerError, InvalidOptionError
from buildlib.genai import GenAIBuilderHTP
from buildlib.graph.files import external_tensors, load_model, tensor_array
from buildlib.graph.shape import GraphShape
from buildlib.passes.arcl import convert_arcl
from buildlib.quantize.options import QuantizationOptions
from buildlib.replay import entry_beside
from buildlib.toolchains.compile_config import CompileConfig
from plugins.pipeline.qairt_modules import qairt_modules
from plugins.pipeline.registry import StageRegistry
from tests.builders import builder_for

LORA = """
    from qairt.modules.lora.lora_config import LoraBuilderInputConfig

    builder.lora_config = LoraBuilderInputConfig(
        lora_config_path="path/to/lora_config.yaml",
        create_lora_graph=True,
        quant_updatable_mode="adapter_only",
        alpha_tensor_name="lora_alpha",
    )
"""
LADE = """
    from qairt.gen_ai_api.configs.lade_config import LadeBuilderConfig

    builder.speculative_config = LadeBuilderConfig(window=8, ngram=5, gcap=8)
"""
SSD = """
    from qairt.gen_ai_api.configs.ssd_config import SsdBuilderConfig

    builder.speculative_config = SsdBuilderConfig(
        forecast_token_count=4,
        forecast_prefix=16,
        branches=[4, 4],
        ssd_tensor_file="./ssd_tensor.pt",
    )
"""
EAGLET = """
    from qairt.gen_ai_api.configs.eaglet_config import EagletBuilderConfig

    builder.speculative_config = EagletBuilderConfig(
        draft_len=6,
        n_branches=6,
        draft_model_path="./draft_model.onnx",
        draft_token_map="./draft_token_map.json",
    )
"""
ATTACH = """
    child = builder.attach_model_for_arn(
        arn=1,
        model_path="path/to/ar1_model.onnx",
        encodings_path="path/to/ar1_model.encodings",  # optional
        name="decode",  # optional; defaults to "attached_ar1", used as the cache subdirectory
    )
"""
CHILD_TRANSFORMATION = """
    child.set_transformation_options(options={
        "mha2sha.m2s_additional_start_points": [M2sStartPoint(...)],
    })
"""
CHILD_TARGETS = """
    child.set_targets(["chipset:SM8850"])
"""
CHILD_COMPILATION = """
    child.set_compilation_options(options={"graphs.vtcm_size_in_mb": 8})
"""
FIND = "find <cache_root> -name '*.bin'"
SIDECAR = {
    "export_format": "DLC_DEFAULT",
    "act_precision": "16",
    "weights_precision": "8",
    "per_channel_quantization": "True",
}
REPLAY = """
    import json
    import qairt
    from qairt.api.compiler.config import CompileConfig

    cache_root = "<cache_root>/llama32"

    # 1. Inspect the compile settings recorded for a previous build.
    with open(f"{cache_root}/compile_<hash>/builder_cache_info.json") as f:
        compile_info = json.load(f)
    print(compile_info["config"]["backend"])      # e.g. "BackendType.HTP"
    print(compile_info["config"]["soc_details"])  # e.g. "chipset:SM8850"

    # 2. Load a converted split (the .dlc produced by a convert stage).
    split = qairt.load(f"{cache_root}/convert_<hash>/my_split.dlc")

    # 3. Reconstruct a CompileConfig from the inspected settings and re-compile.
    config = CompileConfig(backend="HTP", soc_details="chipset:SM8850")
    compiled = qairt.compile(split, config=config)
    compiled.save("my_split_recompiled.bin")
"""
STAGE = """
    from qairt import M2sStartPoint
    from qairt.experimental.pipeline.torch.common.bases.stage import Stage, StageConfig
    from qairt.experimental.pipeline.torch.common.bases.stage_registry import (
        StageRegistry,
        register_stage,
    )

    @register_stage("shorten_it")
    class Shorten(Stage):
        Config = StageConfig
"""
REPLAY_OTHERS = """
    import json
    import qairt

    def config_of(entry):
        with open(f"{entry}/builder_cache_info.json") as f:
            return json.load(f)["config"]

    whole = qairt.arcl(qairt.load(f"{source}/model.onnx"), config=config_of(arcl))
    whole.save("whole")
    parts = qairt.transform(qairt.load(f"{arcl}/model.onnx"), config=config_of(transform))
    parts.save("parts")
    split = qairt.load(f"{transform}/ar1_cl192_1_of_1.onnx")
    converted = qairt.convert(split, config=config_of(convert))
    converted.save("my_split.dlc")
"""
NAMES = """
    from qairt.gen_ai_api.builders.gen_ai_builder import GenAIBuilder
    from qairt.gen_ai_api.builders.gen_ai_builder_htp import GenAIBuilderHTP
    from qairt.gen_ai_api.containers.gen_ai_container import GenAIContainer
    from qairt.gen_ai_api.containers.gen_ai_containerable import GenAIContainerable
    from qairt.experimental.pipeline.torch.common.bases.stage_observer import (
        StageObserver,
        StageProfilerObserver,
    )
"""
VALIDATE = """
    CompileConfig.model_config["extra"] = "allow"
    config = CompileConfig.model_validate(compile_info["config"])
"""


def run(snippet: str, **given: object) -> dict[str, Any]:
    """Run a snippet; return its variables."""
    scope: dict[str, Any] = dict(given)
    with qairt_modules():
        exec(dedent(snippet), scope)  # noqa: S102  (what this file is for)
    return scope


@pytest.fixture(scope="module")
def cache_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of all builders of this file."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def builder(
    one_layer_export: Path, cache_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> GenAIBuilderHTP:
    """A builder of a small model, in a working folder of its own."""
    monkeypatch.chdir(tmp_path)
    return builder_for(one_layer_export, cache_root, [1, 64], target="chipset:SM8850")


@pytest.mark.needs("plugins.lora")
def test_adapters_named_in_yaml(
    builder: GenAIBuilderHTP, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    make_adapter(tmp_path / "path/to/red", {"self_attn.q_proj": (40, 24)}, layers=1)
    (tmp_path / "path/to/lora_config.yaml").write_text(
        "adapters:\n  - name: red\n    path: red\n"
        "use_cases:\n  - {name: pale, adapters: {red: 0.5}}\n"
    )
    run(LORA, builder=builder)
    builder.set_transformation_options({"split_model.num_splits": 3})
    split = builder.plan().plan.options.split_model
    assert (split.split_embedding, split.split_lm_head) == (True, True)
    loaded = LoraSet.load(tmp_path / "path/to/lora_config.yaml")
    assert [case.name for case in loaded.cases] == ["pale"]


def test_lookahead_and_self_speculation(builder: GenAIBuilderHTP, tmp_path: Path) -> None:
    run(LADE, builder=builder)
    assert builder.speculative_config == LadeBuilderConfig(window=8, ngram=5, gcap=8)
    run(SSD, builder=builder)
    ars = "arn_cl_options.auto_regression_number"
    with pytest.raises(InvalidOptionError, match=r"calls of 63 tokens; the largest AR is 32"):
        builder.set_transformation_options({ars: [1, 32]}).plan()
    builder.set_transformation_options({ars: [1, 64]})
    with pytest.raises(InvalidOptionError, match=r"ssd_tensor_file.*no file ssd_tensor\.pt"):
        builder.plan()
    (tmp_path / "ssd_tensor.pt").write_bytes(b"")
    builder.plan()


def test_eaglet(builder: GenAIBuilderHTP, tmp_path: Path) -> None:
    run(EAGLET, builder=builder)
    for name in ("draft_model.onnx", "draft_token_map.json"):
        with pytest.raises(InvalidOptionError, match=f"no file {name}"):
            builder.plan()
        (tmp_path / name).write_bytes(b"")
    builder.plan()


def test_an_attached_builder(
    builder: GenAIBuilderHTP, one_layer_export: Path, tmp_path: Path
) -> None:
    shutil.copytree(one_layer_export, tmp_path / "source")
    place = tmp_path / "path/to/ar1_model.onnx"
    place.parent.mkdir(parents=True)
    convert_arcl(tmp_path / "source" / MODEL_FILE, GraphShape(1, 192), place)
    operator = next(str(node.name) for node in load_model(place).graph if node.name)

    def start_point(_: EllipsisType) -> M2sStartPoint:
        return M2sStartPoint(name=operator)

    child = run(ATTACH, builder=builder)["child"]
    assert child.name == "decode"
    run(CHILD_TRANSFORMATION, child=child, M2sStartPoint=start_point)
    run(CHILD_COMPILATION, child=child)
    run(CHILD_TARGETS, child=child)
    plan = builder.plan().plan
    (one,) = plan.mha2sha[1].m2s_additional_start_points
    assert one.name == operator
    assert plan.graph_options[1] == {"graphs.vtcm_size_in_mb": 8}


@pytest.mark.variant
@pytest.mark.needs("libatomic1")
def test_the_stages_of_an_attached_builder_have_a_folder_of_its_name(
    builder: GenAIBuilderHTP, one_layer_export: Path, cache_root: Path, tmp_path: Path
) -> None:
    shutil.copytree(one_layer_export, tmp_path / "source")
    place = tmp_path / "ar1" / "ar1_model.onnx"
    convert_arcl(tmp_path / "source" / MODEL_FILE, GraphShape(1, 192), place)
    child = builder.attach_model_for_arn(1, place, tmp_path / "source" / "model.encodings")
    assert child.name == "attached_ar1"
    builder.build()
    own = {path.name.partition("_")[0] for path in (cache_root / "attached_ar1").iterdir()}
    assert own == {"import", "quantize", "arcl", "transform", "convert"}


@pytest.mark.needs("libatomic1")
def test_a_stage_is_replayed_from_its_sidecar(
    builder: GenAIBuilderHTP,
    cache_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outputs = builder.plan().outputs()
    (binary,) = outputs.binaries
    (dlc, _) = [path for (path,) in outputs.dlcs.values()]
    sidecar = json.loads((dlc.parent / "builder_cache_info.json").read_text())
    assert sidecar["config"].items() >= SIDECAR.items()
    cache = tmp_path / "<cache_root>" / "llama32"
    cache.mkdir(parents=True)
    (cache / "compile_<hash>").symlink_to(binary.parent)
    (cache / "convert_<hash>").mkdir()
    shutil.copy(dlc, cache / "convert_<hash>" / "my_split.dlc")

    compile_info = run(REPLAY)["compile_info"]
    assert capsys.readouterr().out.splitlines() == ["BackendType.HTP", "chipset:SM8850"]
    assert (tmp_path / "my_split_recompiled.bin").is_file()

    monkeypatch.setitem(CompileConfig.model_config, "extra", "ignore")
    config = run(VALIDATE, CompileConfig=CompileConfig, compile_info=compile_info)["config"]
    assert config == builder.plan().plan.compilation.compiled_part()

    done = subprocess.run(  # noqa: S602  (the documented command)
        FIND.replace("<cache_root>", str(cache_root)),
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(binary) in done.stdout.splitlines()
    described = json.loads(binary.with_name(f"{binary.stem}_cache_info.json").read_text())
    assert [graph["name"] for graph in described["graphs"]] == [
        "ar1_cl192_1_of_1",
        "ar64_cl192_1_of_1",
    ]
    assert described["soc_model"] == 87


@pytest.mark.needs("libatomic1")
def test_they_are_replayed_by_their_documented_names(
    builder: GenAIBuilderHTP, tmp_path: Path
) -> None:
    outputs = builder.plan().outputs()
    converted = outputs.dlcs[next(iter(outputs.dlcs))][0].parent
    info = read_files(converted)
    transformed = entry_beside(converted, info.sources[0]).folder
    shaped = entry_beside(converted, read_files(transformed).sources[0]).folder
    source = entry_beside(converted, read_files(shaped).sources[0]).folder
    scope = run(REPLAY_OTHERS, source=source, arcl=shaped, transform=transformed, convert=converted)
    assert same_models(tmp_path / "whole", shaped)
    assert same_models(tmp_path / "parts", transformed)
    dlc = converted / f"{info.subject}.dlc"
    assert (tmp_path / "my_split.dlc").stat().st_size == dlc.stat().st_size  # it has a date
    assert scope["converted"].graph_names == (info.subject,)
    with pytest.raises(CacheError, match=r"builder_cache_info\.json cannot be read"):
        run('import qairt; qairt.convert(qairt.load("parts/ar1_cl192_1_of_1.onnx"), config={})')


def same_models(copy: Path, entry: Path) -> bool:
    """Whether a folder has the models of an entry, and nothing that only the cache needs."""
    names = {path.name for path in entry.iterdir() if path.name not in {RECORD, ".files.json"}}
    return {path.name for path in copy.iterdir()} == names - {".last_used"} and all(
        path.read_bytes() == (entry / path.name).read_bytes() for path in copy.glob("*.onnx")
    )


@pytest.mark.needs("libatomic1", "plugins.qairt")
def test_the_stages_of_a_container_are_laid_out_as_documented(
    builder: GenAIBuilderHTP, cache_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from plugins.qairt.layout import export_cache

    # Another build of this file makes the same binary of other entries.
    builder.set_compilation_options({"graphs.vtcm_size_in_mb": 4})
    container = builder.build()
    made = export_cache(container, tmp_path / "stages", cache_root=cache_root)
    (group,) = made.iterdir()
    assert group.name == "model"  # the stem of model.onnx
    parts = ["ar1_cl192_1_of_1", "ar64_cl192_1_of_1"]
    stages: dict[str, list[Path]] = {}
    for folder in group.iterdir():
        stages.setdefault(folder.name.partition("_")[0], []).append(folder)
        sidecar = json.loads((folder / RECORD).read_text())
        assert [*sidecar] == ["operation", "source", "config", "hash", "created_at"]
        assert folder.name == f"{sidecar['operation']}_{sidecar['hash'][:32]}"
        assert {type(value) for value in sidecar["config"].values()} == {str}
        assert Path(sidecar["source"]).is_file()
        assert sidecar["created_at"].endswith("+00:00")
    assert {name: len(folders) for name, folders in stages.items()} == {
        "arcl": 1, "transform": 1, "convert": 2, "compile": 1,
    }  # fmt: skip
    assert {"ar1_cl192.onnx", "ar64_cl192.onnx"} <= {p.name for p in stages["arcl"][0].iterdir()}
    (transform,) = stages["transform"]
    assert sorted(path.name for path in transform.iterdir() if path.is_dir()) == sorted(parts)
    for part in parts:
        model = load_model(transform / part / f"{part}.onnx")
        endings = {path.name.removeprefix(part) for path in (transform / part).iterdir()}
        assert {".onnx", ".data", ".encodings"} <= endings <= {
            ".onnx", ".data", ".data2", ".encodings",
        }  # fmt: skip
        assert all(tensor_array(tensor).size for tensor in external_tensors(model))
    assert sorted(path.name for each in stages["convert"] for path in each.glob("*.dlc")) == [
        f"{part}.dlc" for part in sorted(parts)
    ]
    (first,) = stages["compile"]
    assert (first / "ar1_cl192_1_of_1.bin").is_file()
    assert (first / "ar1_cl192_1_of_1_cache_info.json").is_file()
    info = json.loads((first / RECORD).read_text())
    assert json.loads(info["config"]["graph_names"]) == parts
    monkeypatch.setitem(CompileConfig.model_config, "extra", "ignore")
    config = run(VALIDATE, CompileConfig=CompileConfig, compile_info=info)["config"]
    assert config == builder.plan().plan.compilation.compiled_part()
    replayed = REPLAY.replace("<cache_root>/llama32", str(group)).replace(
        "compile_<hash>", first.name
    )
    dlc = Path(info["source"])
    run(replayed.replace("convert_<hash>/my_split.dlc", f"{dlc.parent.name}/{dlc.name}"))
    assert (tmp_path / "my_split_recompiled.bin").is_file()
    with pytest.raises(ContainerError, match="exists already"):
        export_cache(container, made, cache_root=cache_root)
    with pytest.raises(CacheError, match="does not have what"):
        export_cache(container, tmp_path / "other", cache_root=tmp_path / "empty")


def test_classes_stand_under_the_vendors_paths() -> None:
    scope = run(NAMES)
    assert scope["GenAIBuilder"] is scope["GenAIBuilderHTP"] is GenAIBuilderHTP
    assert scope["GenAIContainerable"] is scope["GenAIContainer"] is GenAIContainer
    assert issubclass(scope["StageProfilerObserver"], scope["StageObserver"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("from qairt import QcAutoModelForCausalLM", "use LLMPipeline.from_pretrained"),
        ("from qairt.experimental.pipeline.torch.llm.pipeline import AimetQuantizer", "technique"),
        ("from qairt import Model2", "there are load, arcl, transform, convert, compile"),
        ("from qairt.experimental.torch.auto import QcAutoConfig", "pipeline/pipeline.md"),
    ],
)
def test_a_name_that_is_not_here_says_what_to_use(line: str, said: str) -> None:
    with pytest.raises(ImportError, match=said):
        run(line)
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        exec("import qairt.experimental.torch.auto", {})  # noqa: S102


def test_names_stay_where_a_session_enters_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    qairt_modules().__enter__()
    gc.collect()
    scope: dict[str, Any] = {}
    exec(dedent(STAGE), scope)  # noqa: S102
    assert scope["M2sStartPoint"] is M2sStartPoint
    known = scope["StageRegistry"]().stages()
    assert known["shorten_it"] is scope["Shorten"]
    assert list(known)[:2] == ["model_loader", "quantization_opt"]
    StageRegistry().unregister("shorten_it")


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("LPBQ_SeqMSE_Recipe", "LPBQ_SeqMSE"),
        ("SpinQuant_AdaScale_Recipe", "SpinQuant_AdaScale"),
        ("lpbq_seqmse", "LPBQ_SeqMSE"),
        ("spinquant", "w4a16-spinquant"),
        ("gptaq", "w4a16"),
        ("GPTAQ_Recipe", "w4a16"),
        ("LPBQ", "w4a16-rtn"),
    ],
)
def test_documented_names_of_recipes(name: str, recipe: str) -> None:
    assert QuantizationOptions(recipe=name) == QuantizationOptions(recipe=recipe)
