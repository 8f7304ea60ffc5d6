"""`qnnfarm config check` says who refuses what, and where."""

import json
from pathlib import Path

from harness.errors import BAD, GOOD, NO_ANSWER
from tests.buildlib.container.genie_configurations import DIALOG, HTP, changed
from tests.harness.cli.conftest import Run


def test_files_of_several_kinds(qnnfarm: Run, tmp_path: Path, tiny_bundle: Path) -> None:
    odd = tmp_path / "dialog.json"
    odd.write_text(json.dumps(changed(DIALOG, **{f"{HTP}/pol": True})))
    greedy = tmp_path / "sampler.json"
    greedy.write_text('{"sampler": {"version": 1, "greedy": true, "top-k": 1}}')

    good = qnnfarm("config", "check", greedy, tiny_bundle)
    assert good.returncode == GOOD
    assert "QNN's HTP library accepts it" in good.stdout

    bad = qnnfarm("config", "check", "--json", odd, greedy)
    assert bad.returncode == BAD
    dialog, sampler = json.loads(bad.stdout)
    place = f"/{HTP}/pol"
    hint = "unknown key: did you mean poll?"
    assert dialog["ours"] == {"accepts": False, "faults": [{"pointer": place, "reason": hint}]}
    assert [fault["pointer"] for fault in dialog["genie"]["faults"]] == [place]
    assert sampler["accepted"]


def test_settings_that_the_library_drops_are_refused(qnnfarm: Run, tmp_path: Path) -> None:
    settings = tmp_path / "htp.json"
    settings.write_text('{"graphs": [{"graph_names": ["a"], "surprise": 1}], "memory": {"x": 1}}')
    found = qnnfarm("config", "check", settings, "--json")
    assert found.returncode == BAD
    (row,) = json.loads(found.stdout)
    assert row["ours"]["accepts"]
    assert "Genie would run without" in row["genie"]["faults"][0]["reason"]
    assert [note["pointer"] for note in row["notes"]] == ["/memory/x", "/graphs/0/surprise"]


def test_each_file_gets_its_verdict(qnnfarm: Run, tmp_path: Path) -> None:
    texts = {
        "comment.json": '// template\n{"dialog": {}}',
        "good.json": '{"sampler": {"version": 1, "greedy": true, "top-k": 40}}',
        "list.json": "[]",
        "other.json": '{"sampeler": {}}',
        "node.json": '{"text-encoder": {"version": 1, "lut": {"size": 4}}}',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = qnnfarm("config", "check", "--json", *(tmp_path / n for n in texts), tmp_path / "no")
    assert found.returncode == NO_ANSWER
    rows = json.loads(found.stdout)
    assert [row["accepted"] for row in rows] == [False, True, False, False, False, False]
    comment, good, _, other, node, missing = rows
    assert "which has no comments" in comment["ours"]["faults"][0]["reason"]
    assert [note["pointer"] for note in good["notes"]] == ["/sampler/greedy"]
    assert "did you mean sampler" in other["ours"]["faults"][0]["reason"]
    assert {f["pointer"] for f in node["genie"]["faults"]} == {"/text-encoder/lut/version"}
    assert missing["kind"] is None
