"""A plan's file: what it may say, and how it is told what is wrong with it."""

from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from harness.errors import ConfigFileError
from harness.plans.plan_file import Plan, load_plan
from harness.telemetry.conditions import Conditions
from harness.workloads.bench import Bench
from harness.workloads.command import Command


def load(folder: Path, text: str) -> Plan:
    path = folder / "plan.yaml"
    path.write_text(text)
    return load_plan(path)


def test_keys_left_out_of_a_plan_have_defaults(tmp_path: Path) -> None:
    plan = load(tmp_path, "name: nightly\nworkloads: [{kind: bench}]\n")
    (entry,) = plan.workloads
    assert (entry.workload, entry.label, entry.sessions) == (Bench(), None, 1)
    assert (plan.retries.device, plan.retries.runner, plan.retries.output) == (2, 1, 0)
    assert [device.count for device in plan.devices] == [1]
    assert plan.conditions != "none"
    assert plan.conditions.conditions() == Conditions(
        max_temp_c=45, stable_s=20, max_wait_s=180, screen_off=True, policy="continue"
    )


def test_a_whole_plan_is_read(tmp_path: Path) -> None:
    plan = load(
        tmp_path,
        """
name: nightly
db: postgresql://lab@db/results
pool: pool.yaml
containers:
  - path: ../containers/tiny
    label: tiny
devices:
  - {soc: SM8750, tags: [lab-a, rack-2], count: all}
workloads:
  - {kind: bench, prompt_tokens: 128, warmup: 2, sessions: 3, max_perplexity: 12}
  - {kind: perplexity, text: held.txt, windows: 4, max: 12.5}
  - {kind: generate, prompt: "Hello\\nworld", expect: hello}
  - {kind: command, command: [sh, -c, "echo $(id)"]}
exclude: [{container: tiny, workload: generate}]
retries: {device: 5}
timeouts: {cell_s: 60, lease_s: 5}
conditions: {max_temp_c: 38, charge: {min_percent: 20}, policy: fail}
telemetry: false
""",
    )
    assert plan.devices[0].tags == ("lab-a", "rack-2")
    assert plan.timeouts.cell_s == 60
    assert plan.workloads[3].workload == Command(command=("sh", "-c", "echo $(id)"))
    assert plan.conditions != "none"
    charge = plan.conditions.conditions().charge
    assert charge is not None
    assert charge.min_percent == 20


MINIMAL = "name: x\nworkloads: [{kind: bench}]\n"


@pytest.mark.parametrize(
    ("text", "key", "reason"),
    [
        ("name: x\n", "workloads", "it is missing"),
        (MINIMAL + "colour: red\n", "colour", "unknown key"),
        (MINIMAL + "runtimes: [geni]\n", "runtimes[0]", "called 'geni': there are genie"),
        (MINIMAL + "devices: [{sco: SM8750}]\n", "devices[0].sco", "unknown key"),
        (MINIMAL + "devices: [{count: 0}]\n", "devices[0].count", "or must be 'all'"),
        (MINIMAL + "timeouts: {cell_s: .inf}\n", "timeouts.cell_s", "finite"),
        (MINIMAL + "conditions: {max_temp_c: 900}\n", "conditions", "900 is not between"),
        (MINIMAL + "exclude: [{}]\n", "exclude[0]", "name a container"),
        ("name: x\nworkloads: [{kind: bench}, {kind: bench, new_tokens: 0}]\n",
         "workloads[1].new_tokens", "must be at least 1"),
        ("name: x\nworkloads: [{kind: bunch}]\n", "workloads[0]", "'bunch'"),
        ("name: x\nworkloads: [{kind: command, command: rm -rf /}]\n",
         "workloads[0].command", "must be a list of texts"),
        ("name: x\nworkloads: [{kind: command, command: [A=b, ls]}]\n",
         "workloads[0]", "names a program"),
        ("name: x\nworkloads: [{kind: command, command: ['a\\0b']}]\n".replace("\\0", "\\x00")
         .replace("'", '"'), "workloads[0].command[0]", "match pattern"),
        ("name: ../x\nworkloads: [{kind: bench}]\n", "name", "match pattern"),
        (MINIMAL + "devices: [{count: 1, count: 2}]\n", "devices[0].count", "given twice"),
        (MINIMAL + "devices: [{[a]: 2}]\n", "devices[0]", "cannot be a key"),
        ("name: x\nworkloads: [{kind: command, comand: [ls]}]\n",
         "workloads[0].command", "it is missing; line 2, workloads[0].comand: unknown key"),
        ("name: x\nworkloads: [{kind: generate}]\n",
         "workloads[0]", "give one of `prompt`, `prompt_file`, `tokens`, `embeddings`: none"),
        ("name: x\nworkloads: [{kind: bench, lora: {red: 1, blue: 1}}]\n",
         "workloads[0].lora", "2 adapters: Genie applies one at a time"),
        (MINIMAL + "devices: [\n", "", "not valid YAML: "),
        (MINIMAL + "colour: red\ndb: 3\n",
         "db", "must be a text; line 3, colour: unknown key"),
        ("!!python/object/apply:os.system [ls]\n", "", "not valid YAML"),
        ("[" * 5000, "", "nested too deeply"),
        ("", "name", "it is missing; workloads: it is missing"),
    ],
)  # fmt: skip
def test_errors_name_file_and_key(tmp_path: Path, text: str, key: str, reason: str) -> None:
    with pytest.raises(ConfigFileError) as caught:
        load(tmp_path, text)
    assert caught.value.key == key
    assert reason in caught.value.reason
    assert "<byte string>" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "plan.yaml"))
    assert str(caught.value).isprintable()
    assert caught.value.exit_code == 2


def test_labels_are_short_texts_of_the_user(tmp_path: Path) -> None:
    text = "name: nightly\nworkloads: [{kind: bench}]\nlabels: {team: camera, night: '20'}\n"
    assert load(tmp_path, text).labels == {"team": "camera", "night": "20"}
    for wrong in ("{'a b': x}", "{team: ''}", "{team: 3}", "[team]"):
        with pytest.raises(ConfigFileError, match="labels"):
            load(tmp_path, text.partition("labels")[0] + f"labels: {wrong}\n")


def test_the_line_of_a_mistake_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match=r"plan\.yaml, line 3, name: the key is given twice"):
        load(tmp_path, MINIMAL + "name: y\n")
    with pytest.raises(ConfigFileError, match=r"plan\.yaml, line 4: not valid YAML: "):
        load(tmp_path, MINIMAL + "devices: [\n")


def test_parts_that_are_alike_are_written_once(tmp_path: Path) -> None:
    text = MINIMAL + "devices: [&one {soc: SM8750, count: 2}, {<<: *one, count: all}, *one]\n"
    assert [(d.soc, d.count) for d in load(tmp_path, text).devices] == [
        ("SM8750", 2), ("SM8750", "all"), ("SM8750", 2)
    ]  # fmt: skip


def test_a_plan_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match="No such file"):
        load_plan(tmp_path / "plan.yaml")


def test_a_file_of_any_size_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    with path.open("wb") as sink:
        sink.truncate(1 << 40)
    with pytest.raises(ConfigFileError, match="larger than"):
        load_plan(path)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates()
KEYS = st.sampled_from([*Plan.model_fields, *Bench.model_fields, "command", "path"]) | SCALARS
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=20
)


@given(st.dictionaries(st.sampled_from(list(Plan.model_fields)), TREES))
@example({"name": "x", "workloads": [{"kind": ["bench"]}]})
@example({"name": "x", "workloads": {"kind": "bench"}})
def test_any_yaml_is_a_plan_or_an_error_of_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, object]
) -> None:
    folder = tmp_path_factory.mktemp("plan")
    said = ""
    try:
        load(folder, yaml.safe_dump(content, allow_unicode=True))
    except ConfigFileError as error:
        said = str(error)
    assert not said or said.isprintable()


@given(st.text(max_size=200))
def test_any_text_is_a_plan_or_an_error_of_one_line(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigFileError) as caught:
        load_plan(path)
    assert str(caught.value).isprintable()


@pytest.mark.needs("plugins.other_runtimes", "plugins.diagnosis")
def test_the_example_plans_can_be_used() -> None:
    found = sorted((Path(__file__).parents[3] / "suites" / "plans").glob("*.yaml"))
    assert found
    for path in found:
        load_plan(path)
