import json
from typing import Any, get_args

import pytest

from buildlib.container.manifest import (
    ContainerMetadata,
    FileRecord,
    GraphsRecord,
    ModelRecord,
    PartKind,
    TargetRecord,
    build_metadata,
    content_digest,
    file_name_problem,
    parse_metadata,
    plain_name,
)
from buildlib.errors import ContainerError

Values = dict[str, Any]


def manifest() -> ContainerMetadata:
    """A manifest with all that every format has, in which no field has its default."""
    kinds = get_args(PartKind)
    files = {
        f"{kind}s/{number}.bin": FileRecord(sha256=f"{number:064}", size_bytes=number, kind=kind)
        for number, kind in enumerate(kinds)
    }
    return build_metadata(
        model=ModelRecord(
            name="m", architecture="llama", parameters=5, inputs={"a \u0416": "b" * 64},
            quantization={"weights": "int8", "bits": 8, "exact": False, "none": None},
        ),
        graphs=GraphsRecord(
            auto_regression_numbers=(1, 8), context_length=64, context_lengths=(32, 64), splits=2
        ),
        target=TargetRecord(
            name="SM8750", soc_model=69, dsp_arch="v79", emulator=False, weight_sharing=True
        ),
        toolchain={"toolchain": "t"},
        options={"ars": (1, 8), "x": None},
        files=files,
    )  # fmt: skip


@pytest.fixture
def manifest_text() -> Values:
    values: Values = json.loads(manifest().to_json())
    return values


def parse(values: Values) -> ContainerMetadata:
    return parse_metadata(json.dumps(values).encode(), "folder")


def test_a_manifest_survives_its_text() -> None:
    text = manifest().to_json()
    again = parse_metadata(text.encode(), "folder")
    assert again == manifest()
    assert again.to_json() == text
    assert next(iter(json.loads(text))) == "format_version"


def test_digest_is_of_the_content_alone() -> None:
    files = manifest().files
    assert content_digest(files) == content_digest(dict(reversed([*files.items()])))
    name = next(iter(files))
    changed = {**files, name: files[name].model_copy(update={"size_bytes": 2**51})}
    assert content_digest(changed) != content_digest(files)


@pytest.mark.parametrize("value", [..., None, [1], {"x": {}}, -1])
def test_a_damaged_manifest_is_one_typed_line(value: object) -> None:
    optional = {"container_type", "contract", "speculation", "loss", "op_packages"}
    for key in json.loads(manifest().to_json()).keys() - optional:
        values = json.loads(manifest().to_json())
        values[key] = value
        if value is ...:
            del values[key]
        with pytest.raises(ContainerError) as caught:
            parse(values)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", [1, 2])
def test_older_formats_are_read_and_keep_their_digest(manifest_text: Values, version: int) -> None:
    given = manifest()
    digest, lengths = content_digest(given.files), given.graphs.context_lengths
    values = manifest_text | {"format_version": version}
    with pytest.raises(ContainerError, match="container_sha256"):
        parse(values)
    values["container_sha256"] = digest
    if version == 1:
        lengths = (given.graphs.context_length,)
        values["created_at"] = "2026-05-31T12:00:00Z"
        del values["container_type"], values["graphs"]["context_lengths"]
    graphs = given.graphs.model_copy(update={"context_lengths": lengths})
    changed = {"graphs": graphs, "format_version": 2, "container_sha256": digest}
    assert parse(values) == given.model_copy(update=changed)


@pytest.mark.parametrize(
    ("place", "value"),
    [("model.name", "other"), ("model.architecture", "qwen2"), ("model.parameters", 7),
     ("graphs.splits", 3), ("graphs.auto_regression_numbers", [1, 32]),
     ("target.name", "SM8650"), ("target.emulator", True), ("contract", "executorch"),
     ("container_sha256", "0" * 64)],
)  # fmt: skip
def test_the_digest_covers_what_identifies_a_container(
    manifest_text: Values, place: str, value: object
) -> None:
    assert parse(manifest_text).contract == "genie"
    part, _, key = place.rpartition(".")
    (manifest_text[part] if part else manifest_text)[key] = value
    with pytest.raises(ContainerError, match="container_sha256"):
        parse(manifest_text)


@pytest.mark.parametrize("control", ["\x1b[31m", "\n", "\x9b", "\u202e", "\u2028"])
def test_names_that_a_terminal_would_obey_are_refused(manifest_text: Values, control: str) -> None:
    manifest_text["model"]["name"] = f"llama{control}"
    with pytest.raises(ContainerError, match=r"/model/name: has the control char") as caught:
        parse(manifest_text)
    assert str(caught.value).isprintable()


def test_the_name_of_a_folder_becomes_one_that_can_be_shown() -> None:
    assert plain_name("Llama 3.2 (мой)\n[b]") == "Llama 3.2 (мой) [b]"
    assert plain_name("\x1b\n") == "model"
    assert plain_name("a" * 240) == "a" * 200


@pytest.mark.parametrize("lengths", [(512, 256), (256,), (256, 512, 1024), (512, 512), (0, 512)])
def test_context_lengths_ascend_to_that_of_the_dialog(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="context_length"):
        GraphsRecord(
            auto_regression_numbers=(1,), context_length=512, context_lengths=lengths, splits=1
        )


@pytest.mark.parametrize(
    "names",
    [["a", "a/b"], ["../a"], ["a/../b"], ["/a"], ["a//b"], ["a/"], [".a"], ["a/.b"], ["-a"],
     ["metadata.json"], ["a\\b"], ["a\n"], ["x" * 201], ["/".join(["x" * 100] * 11)], [""]],
)  # fmt: skip
def test_names_that_reach_out_or_clash(names: list[str]) -> None:
    assert file_name_problem(names)


def test_another_kind_of_container_is_refused(manifest_text: Values) -> None:
    manifest_text["container_type"] = "ImageContainer"
    with pytest.raises(ContainerError, match="container_type"):
        parse(manifest_text)
