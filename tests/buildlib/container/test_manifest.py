import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib.container.layout import file_name_problem
from buildlib.container.manifest import (
    ContainerMetadata,
    FileRecord,
    GraphsRecord,
    ModelRecord,
    PartKind,
    TargetRecord,
    build_metadata,
    content_digest,
    parse_metadata,
    plain_name,
)
from buildlib.errors import ContainerError

hashes = st.text("0123456789abcdef", min_size=64, max_size=64)
segments = st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9_.+-]{0,30}\Z")
names = st.lists(segments, min_size=1, max_size=3).map("/".join)
records = st.builds(
    FileRecord,
    sha256=hashes,
    size_bytes=st.integers(0, 2**50),
    kind=st.sampled_from(get_args(PartKind)),
)
files = st.dictionaries(names, records, min_size=1, max_size=5).filter(
    lambda some: file_name_problem(some) is None
)
words = st.text(max_size=20)
plain = st.text(st.characters(exclude_categories=["Cc", "Cs", "Cf", "Zl", "Zp"]), max_size=50)
scalars = words | st.integers(-(2**53), 2**53) | st.booleans() | st.none()
manifests = st.builds(
    build_metadata,
    model=st.builds(
        ModelRecord,
        name=plain.filter(bool),
        architecture=plain,
        parameters=st.none() | st.integers(0, 10**12),
        inputs=st.dictionaries(words, hashes, max_size=4),
        quantization=st.dictionaries(words, scalars, max_size=4),
    ),
    graphs=st.builds(
        GraphsRecord,
        auto_regression_numbers=st.lists(st.integers(1, 4096), min_size=1, max_size=4).map(tuple),
        context_length=st.just(2**20),
        context_lengths=st.sets(st.integers(1, 2**20 - 1), max_size=3).map(
            lambda lengths: (*sorted(lengths), 2**20)
        ),
        splits=st.integers(1, 64),
    ),
    target=st.builds(
        TargetRecord,
        name=plain,
        soc_model=st.integers(0, 500),
        dsp_arch=plain,
        emulator=st.booleans(),
        weight_sharing=st.booleans(),
    ),
    toolchain=st.dictionaries(words, words, max_size=4),
    options=st.dictionaries(words, scalars | st.lists(scalars, max_size=3).map(tuple), max_size=4),
    files=files,
)


@given(manifests)
def test_a_manifest_survives_its_text(manifest: ContainerMetadata) -> None:
    text = manifest.to_json()
    again = parse_metadata(text.encode(), "folder")
    assert again == manifest
    assert again.to_json() == text
    first, *_ = json.loads(text)
    assert first == "format_version"


@given(files)
def test_digest_is_of_the_content_alone(files: dict[str, FileRecord]) -> None:
    reversed_files = dict(reversed(files.items()))
    assert content_digest(files) == content_digest(reversed_files)
    name = next(iter(files))
    changed = files | {name: files[name].model_copy(update={"size_bytes": 2**51})}
    assert content_digest(changed) != content_digest(files)


@given(manifests, st.data())
def test_a_damaged_manifest_is_one_typed_line(
    manifest: ContainerMetadata, data: st.DataObject
) -> None:
    values = json.loads(manifest.to_json())
    key = data.draw(
        st.sampled_from(
            sorted(
                set(values) - {"container_type", "contract", "speculation", "loss", "op_packages"}
            )
        )
    )
    if data.draw(st.booleans()):
        del values[key]
    else:
        values[key] = data.draw(st.none() | st.just([1]) | st.just({"x": {}}) | st.just(-1))
    with pytest.raises(ContainerError) as caught:
        parse_metadata(json.dumps(values).encode(), "folder")
    assert "\n" not in str(caught.value)


@given(manifests, st.sampled_from([1, 2]))
def test_older_formats_are_read_and_keep_their_digest(
    manifest: ContainerMetadata, version: int
) -> None:
    digest = content_digest(manifest.files)
    values = json.loads(manifest.to_json()) | {"format_version": version}
    with pytest.raises(ContainerError, match="container_sha256"):
        parse_metadata(json.dumps(values).encode(), "folder")
    values["container_sha256"] = digest
    lengths = manifest.graphs.context_lengths
    if version == 1:
        lengths = (manifest.graphs.context_length,)
        values["created_at"] = "2026-05-31T12:00:00Z"
        del values["container_type"], values["graphs"]["context_lengths"]
    graphs = manifest.graphs.model_copy(update={"context_lengths": lengths})
    changed = {"graphs": graphs, "format_version": 2, "container_sha256": digest}
    read = parse_metadata(json.dumps(values).encode(), "folder")
    assert read == manifest.model_copy(update=changed)


@pytest.mark.parametrize(
    ("place", "value"),
    [("model.name", "other"), ("model.architecture", "qwen2"), ("model.parameters", 7),
     ("graphs.splits", 2), ("graphs.auto_regression_numbers", [1, 32]),
     ("target.name", "SM8650"), ("target.emulator", True), ("contract", "executorch"),
     ("container_sha256", "0" * 64)],
)  # fmt: skip
def test_the_digest_covers_what_identifies_a_container(
    manifest_text: dict[str, Any], place: str, value: object
) -> None:
    assert parse_metadata(json.dumps(manifest_text).encode(), "folder").contract == "genie"
    part, _, key = place.rpartition(".")
    (manifest_text[part] if part else manifest_text)[key] = value
    with pytest.raises(ContainerError, match="container_sha256"):
        parse_metadata(json.dumps(manifest_text).encode(), "folder")


@pytest.mark.parametrize("control", ["\x1b[31m", "\n", "\x9b", "\u202e", "\u2028"])
def test_names_that_a_terminal_would_obey_are_refused(
    manifest_text: dict[str, Any], control: str
) -> None:
    manifest_text["model"]["name"] = f"llama{control}"
    with pytest.raises(ContainerError, match=r"/model/name: has the control char") as caught:
        parse_metadata(json.dumps(manifest_text).encode(), "folder")
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


def test_another_kind_of_container_is_refused(manifest_text: dict[str, Any]) -> None:
    manifest_text["container_type"] = "ImageContainer"
    with pytest.raises(ContainerError, match="container_type"):
        parse_metadata(json.dumps(manifest_text).encode(), "folder")


@pytest.fixture
def manifest_text() -> dict[str, Any]:
    record = FileRecord(sha256="a" * 64, size_bytes=1, kind="binary")
    manifest = build_metadata(
        model=ModelRecord(name="m", architecture="llama", inputs={}, quantization={}),
        graphs=GraphsRecord(auto_regression_numbers=(1,), context_length=64, splits=1),
        target=TargetRecord(
            name="SM8750", soc_model=69, dsp_arch="v79", emulator=False, weight_sharing=True
        ),
        toolchain={},
        options={},
        files={"a.bin": record},
    )
    values: dict[str, Any] = json.loads(manifest.to_json())
    return values
