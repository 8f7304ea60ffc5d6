#!/bin/sh
# Builds the wheel, installs it into an empty environment outside the checkout and runs the demo there.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
"$PYTHON" -m pip wheel -q --disable-pip-version-check --no-deps -w "$work/dist" .
"$PYTHON" -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check "$work"/dist/qnnfarm-*.whl
mkdir "$work/empty"
cd "$work/empty"
QNNFARM_CACHE_DIR="$work/cache" QNNFARM_STATE_DIR="$work/state" "$work/venv/bin/qnnfarm" demo --out out
test -s out/report.html
test -s out/results.db
