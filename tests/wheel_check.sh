#!/bin/sh
# Builds the wheel, installs it into an empty environment outside the checkout, and runs the demo and a suite there.
set -eu
work=$(mktemp -d)
finish() {
  [ ! -x "$work/venv/bin/qnnfarm" ] || "$work/venv/bin/qnnfarm" device rm wheel >/dev/null 2>&1 || true
  rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
"$PYTHON" -m pip wheel -q --disable-pip-version-check --no-deps -w "$work/dist" .
"$PYTHON" -m venv "$work/venv"
wheel=$(echo "$work"/dist/qnnfarm-*.whl)
"$work/venv/bin/pip" install -q --disable-pip-version-check "qnnfarm[pytest] @ file://$wheel"
mkdir "$work/empty"
cd "$work/empty"
export QNNFARM_CACHE_DIR="$work/cache" QNNFARM_STATE_DIR="$work/state"
"$work/venv/bin/qnnfarm" demo --out out
test -s out/report.html
test -s out/results.db

"$work/venv/bin/qnnfarm" device start wheel || "$work/venv/bin/qnnfarm" device start wheel --unconfined
"$work/venv/bin/pytest" --pyargs suites.test_smoke --container out/containers/SM8750 --device virtual:wheel \
  --qnnfarm-db suites.db
test -s suites.db
