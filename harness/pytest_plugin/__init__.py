"""The pytest plugin: tests lease devices, run containers on them and record measurements.

It is loaded by every pytest run of a machine where qnnfarm is installed, so it then imports
pytest and the standard library alone. Modules that load more (`device_tests`, `option_checks`,
`baseline`, `marker`) are imported in functions, when an option or a test needs them.
"""

pytest_plugins = ["harness.pytest_plugin.fixtures", "harness.pytest_plugin.hooks"]
