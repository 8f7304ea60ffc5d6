"""The extensions file says what the options say."""

import json

from buildlib.container.htp_config import HtpConfig
from buildlib.container.writer import htp_config
from buildlib.targets import parse_target
from buildlib.toolchains.compile_config import CompileConfig

PHONE = parse_target("SM8750")


def test_options_of_the_run_reach_the_file_and_those_of_the_compiler_do_not() -> None:
    config = CompileConfig.for_target(PHONE).with_options(
        {
            "devices.cores.perf_profile": "balanced",
            "groupContext.share_resources": True,
            "graphs.hvx_threads": 4,
            "context.weight_sharing_enabled": False,
            "context.extended_udma": True,
            "context.file_read_memory_budget_in_mb": 64,
            "devices.pd_session": "unsigned",
        }
    )
    written = htp_config(config)
    core = json.loads(written.to_json())["devices"][0]["cores"][0]
    assert core == {"core_id": 0, "perf_profile": "balanced", "rpc_control_latency": 100}
    assert written.group_context is not None
    assert written.group_context.share_resources
    assert [context.weight_sharing_enabled for context in written.contexts] == [False]
    assert written.graphs is None
    assert [context.file_read_memory_budget_in_mb for context in written.contexts] == [64]
    assert [device.pd_session for device in written.devices or ()] == ["unsigned"]
    assert "extended_udma" not in written.to_json()
    assert HtpConfig.from_json(written.to_json()) == written


def test_a_target_alone_gives_the_defaults() -> None:
    assert htp_config(PHONE) == htp_config(CompileConfig.for_target(PHONE))
    both = [htp_config(parse_target(text)) for text in ("SM8650", "SM8650:emulator")]
    assert [device.soc_model for device in both[0].devices or ()] == [57]
    sharing = [c.weight_sharing_enabled for each in both for c in each.contexts]
    assert sharing == [True, False]


def test_unknown_options_are_written_as_they_are() -> None:
    config = CompileConfig.from_backend_extensions({"devices": [{"odd": 1}], "more": {}}, PHONE)
    written = json.loads(htp_config(config).to_json())
    assert (written["devices"][0]["odd"], written["more"]) == (1, {})
