#!/bin/sh
# Builds the wheel, installs it into an empty environment outside the checkout, and runs the demo and all suites there.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
rm -rf build/lib build/bdist.*  # setuptools packs what an earlier build left there, too
"$PYTHON" -m pip wheel -q --disable-pip-version-check --no-deps -w "$work/dist" .
"$PYTHON" -m venv "$work/venv"
wheel=$(echo "$work"/dist/qnnfarm-*.whl)
"$work/venv/bin/pip" install -q --disable-pip-version-check "qnnfarm[build,pytest] @ file://$wheel"
QNNFARM_TEST_PYTHON="$work/venv/bin/python" "$PYTHON" -m pytest -n 2 -m slow tests/suites \
  tests/plugins/speculation/test_suite.py -k "not twenty_prompts"
