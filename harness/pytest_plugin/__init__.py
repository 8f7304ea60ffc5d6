"""The pytest plugin: tests lease devices, run containers on them and record what they measure.

It is loaded by every pytest run of a machine where qnnfarm is installed, so it imports nothing but
pytest and the standard library until a test asks for a device.
"""

from harness.pytest_plugin.fixtures import (
    _qnnfarm_lease,
    _qnnfarm_model,
    _qnnfarm_path,
    _qnnfarm_session,
    container,
    device,
    devices,
    pool,
    record_measurement,
    recording,
    session,
)
from harness.pytest_plugin.hooks import (
    pytest_addoption,
    pytest_collection_finish,
    pytest_configure,
    pytest_generate_tests,
    pytest_pycollect_makeitem,
    pytest_report_header,
    pytest_report_teststatus,
    pytest_runtest_makereport,
    pytest_runtest_setup,
    pytest_runtest_teardown,
)

__all__ = [
    "_qnnfarm_lease",
    "_qnnfarm_model",
    "_qnnfarm_path",
    "_qnnfarm_session",
    "container",
    "device",
    "devices",
    "pool",
    "pytest_addoption",
    "pytest_collection_finish",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_pycollect_makeitem",
    "pytest_report_header",
    "pytest_report_teststatus",
    "pytest_runtest_makereport",
    "pytest_runtest_setup",
    "pytest_runtest_teardown",
    "record_measurement",
    "recording",
    "session",
]
