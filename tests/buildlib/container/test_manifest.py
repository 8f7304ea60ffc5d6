import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib.container.manifest import (
    ContainerMetadata,
    FileRecord,
    GraphsRecord,
    ModelRecord,
    TargetRecord,
    build_metadata,
    content_digest,
    parse_metadata,
)
from buildlib.errors import ContainerError

hashes = st.text("0123456789abcdef", min_size=64, max_size=64)
names = st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9_.+-]{0,30}\Z").filter(
    lambda name: name != "metadata.json"
)
records = st.builds(
    FileRecord,
    sha256=hashes,
    size_bytes=st.integers(0, 2**50),
    kind=st.sampled_from(["binary", "tokenizer", "configuration"]),
)
words = st.text(max_size=20)
scalars = words | st.integers(-(2**53), 2**53) | st.booleans() | st.none()
manifests = st.builds(
    build_metadata,
    model=st.builds(
        ModelRecord,
        name=st.text(min_size=1, max_size=50),
        architecture=words,
        parameters=st.none() | st.integers(0, 10**12),
        inputs=st.dictionaries(words, hashes, max_size=4),
        quantization=st.dictionaries(words, scalars, max_size=4),
    ),
    graphs=st.builds(
        GraphsRecord,
        auto_regression_numbers=st.lists(st.integers(1, 4096), min_size=1, max_size=4).map(tuple),
        context_length=st.integers(1, 2**20),
        splits=st.integers(1, 64),
    ),
    target=st.builds(
        TargetRecord,
        name=words,
        soc_model=st.integers(0, 500),
        dsp_arch=words,
        emulator=st.booleans(),
        weight_sharing=st.booleans(),
    ),
    toolchain=st.dictionaries(words, words, max_size=4),
    options=st.dictionaries(words, scalars | st.lists(scalars, max_size=3).map(tuple), max_size=4),
    files=st.dictionaries(names, records, min_size=1, max_size=5),
    created_at=st.datetimes(timezones=st.just(UTC)),
)


@given(manifests)
def test_a_manifest_survives_its_text(manifest: ContainerMetadata) -> None:
    text = manifest.to_json()
    again = parse_metadata(text.encode(), "folder")
    assert again == manifest
    assert again.to_json() == text
    first, *_, last = json.loads(text)
    assert (first, last) == ("format_version", "created_at")


@given(st.dictionaries(names, records, min_size=2, max_size=6), st.randoms())
def test_digest_is_of_the_content_alone(files: dict[str, FileRecord], random: object) -> None:
    del random
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
    key = data.draw(st.sampled_from(sorted(values)))
    if data.draw(st.booleans()):
        del values[key]
    else:
        values[key] = data.draw(st.none() | st.just([1]) | st.just({"x": {}}) | st.just(-1))
    with pytest.raises(ContainerError) as caught:
        parse_metadata(json.dumps(values).encode(), "folder")
    assert "\n" not in str(caught.value)


def test_time_must_say_its_zone() -> None:
    with pytest.raises(ValueError, match="timezone"):
        ContainerMetadata.model_validate(
            {"created_at": datetime(2026, 1, 1).isoformat()}  # noqa: DTZ001 - the point of it
        )
