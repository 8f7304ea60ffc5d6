# The commands of a contributor; `.ci/run` runs the same ones.
PYTHON ?= .venv/bin/python

# What there is to make, with what each does, from this file.
help:
	@awk '/^# /{about = substr($$0, 3)} /^$$/{about = ""} \
	      about && /^[a-z-]+:/{sub(/:.*/, ""); printf "%-20s %s\n", $$0, about; about = ""}' Makefile

ifeq ($(filter help setup,$(or $(MAKECMDGOALS),help)),)
ifeq (,$(shell command -v $(PYTHON)))
$(error there is no $(PYTHON): `make setup` makes it)
endif
endif

.PHONY: help setup check docs format test genie-table genie-mutations quantization-table real-model fuzz variants exports families mutants options speculation config-campaign documents family-defaults kills lab-kills hosts copies chaos nights verdicts board demo examples screenshots without wheel-check

# The environment of all commands below in `.venv`, and the Debian packages that tests need.
setup:
	python3 -m tools.test --set-up

# Linter, formatter, mypy --strict, the import contracts, and links of the documents.
check: docs
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

# The site of the documents, in build/site; a link that leads nowhere is an error.
docs:
	$(PYTHON) -m sphinx -W --keep-going -n -q -j auto -c docs . build/site

# Format the code, and mend what the linter can.
format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

# The suite; `.venv/bin/pytest PATH` for a part of it.
test:
	$(PYTHON) -m pytest

# Every Genie configuration that some test runs on the emulator; writes the table of docs/genie-configurations.md.
genie-table:
	$(PYTHON) -m tools.genie_table

# Random mutations of valid Genie configurations, judged by our models and by libGenie; `QNNFARM_FUZZ_SEED=7 make genie-mutations` for others; two minutes.
genie-mutations:
	$(PYTHON) -m pytest -n 0 -q -s -m slow tests/plugins/diagnosis/test_genie_agreement.py

# A build of every family of checkpoints on the emulator against float; the suite takes one of them.
families:
	$(PYTHON) -m pytest -n 0 -m "slow or not slow" tests/buildlib/builder/test_families.py

# Further ways along paths that the suite takes once: the second shell, engine and confinement, techniques, adapters, layouts of pages, chats, workers of xdist; a quarter of an hour.
variants:
	$(PYTHON) -m pytest -m "variant and not slow"
	QNNFARM_VIRTUAL_NAMESPACE=none $(PYTHON) -m pytest tests/plugins/virtual_android

# Every option of a build on the emulator, and whether a file of the container is another one; ten minutes.
options:
	$(PYTHON) -m pytest -n 0 -m slow tests/buildlib/test_every_option.py

# SSD and Eaglet against plain decoding, over prompts, turns and adapters; half an hour.
speculation:
	$(PYTHON) -m pytest -n 0 -m slow tests/plugins/speculation tests/harness/cli/test_perplexity.py

# Every command and every snippet of README and docs, in order, and what they print; the suite takes those that need no build; half an hour.
documents:
	$(PYTHON) -m pytest -n 0 -m "slow or not slow" tests/test_snippets.py

# A thousand drawn `config.json`s against transformers, by the Python that has it: `make config-campaign REFERENCE=PYTHON`.
REFERENCE ?= $(PYTHON)
config-campaign:
	QNNFARM_REFERENCE=$(REFERENCE) $(PYTHON) -m pytest -n 0 -s -m slow tests/buildlib/configurations

# The keys of `config.json` that each family reads, and their defaults; run it for transformers 4 and 5.
family-defaults:
	$(REFERENCE) -W ignore -m tools.family_defaults

# Every quantization recipe on the reference model, from weights to the emulator; writes the table of benchmarks/quantization.md.
quantization-table:
	nice -n 10 $(PYTHON) -m tools.quantization_table

# The same of any checkpoint, over texts of three kinds: `make real-model MODEL=DIR`; `ARGUMENTS="--recipes w8a16 --emulator"` for a part, and the emulator.
real-model:
	nice -n 10 $(PYTHON) -m tools.quantization_table --model $(MODEL) $(ARGUMENTS)

# Thousands of damaged models, refused in one line or built soundly; `QNNFARM_FUZZ_SEED=7 make fuzz` for others; half an hour.
fuzz:
	$(PYTHON) -m pytest -n 0 -s -m slow tests/fuzz

# Exports of all tools in `tests/fixtures/exports` through every stage; the suite builds one of them.
exports:
	$(PYTHON) -m pytest -m "slow or not slow" tests/plugins/onnx_exports/test_builds.py

# A build at each step, and writers of results on each engine, `qnnfarm run` and `qnnfarm nightly`, each killed at a hundred random moments.
kills:
	$(PYTHON) -m pytest -n 0 -s -m slow tests/buildlib/cache/test_killed.py tests/harness/results/test_killed_writers.py tests/harness/plans/test_killed_runs.py

# Workers, submitters, hosts and the database of a lab, killed a hundred times over a plan of 300 cells; `QNNFARM_LAB_SEED=7 make lab-kills` for others; half an hour.
lab-kills:
	$(PYTHON) -m pytest -n 0 -s -m slow tests/plugins/lab/test_kills.py

# Leases of three hosts whose workers are cut off, stopped and killed; `QNNFARM_LEASES=500 make hosts` for fewer than ten thousand; hours.
hosts:
	$(PYTHON) -m pytest -n 0 -s -m slow tests/harness/pool tests/plugins/ssh_devices

# Leases under ledgers that go back to an earlier state and have copies; `QNNFARM_SEED=7 make copies` for others; half an hour.
copies:
	QNNFARM_LEASES=2000 $(PYTHON) -m pytest -n 0 -s --timeout 7200 tests/harness/pool/test_copies.py -k never_has

# Hundreds of faults over pushes, runs and leases; `QNNFARM_CHAOS_SEED=7 make chaos` for others; a quarter of an hour.
chaos:
	$(PYTHON) -m pytest -n 0 -s -m slow tests/chaos

# Thirty nights of a plan on a virtual device that heats up on the twentieth.
nights:
	$(PYTHON) -m pytest -n 0 -s -m slow tests/plugins/nightly

# Properties over new random examples, a hundred each unless they say how many; the suite has the same 25 each time.
examples:
	$(PYTHON) -m pytest -m "hypothesis and not slow" --hypothesis-profile new

# How many random changes of the statistics, the pool's rules and the passes go unnoticed; needs the extra `mutants`; half an hour.
mutants:
	$(PYTHON) -m tools.mutants

# Sixty random databases, in everything that prints a verdict; ten minutes.
verdicts:
	$(PYTHON) -m pytest -n 0 -m slow --hypothesis-profile new tests/reports/test_one_verdict.py

# A board with arm64's Python under qemu and the real arm64 libraries from PyPI; needs Debian's qemu-user-static.
board:
	sh tools/arm64_root.sh build/arm64
	QNNFARM_ARM64_ROOT=$(CURDIR)/build/arm64/root $(PYTHON) -m pytest -n 0 -m slow tests/plugins/ssh_devices/test_board.py

# `qnnfarm demo`.
demo:
	$(PYTHON) -m harness.cli demo

# Each page of a report on a desktop and a phone, light and dark: `make screenshots REPORT=report.html`; needs Debian's chromium and chromium-driver.
REPORT ?= report.html
screenshots:
	$(PYTHON) -m tools.screenshots $(REPORT) build/screenshots

# Whether everything else works without each plugin in turn; `make without PLUGIN=mllm` for one, `PLUGIN=all` for the core alone; hours.
PLUGIN ?= each
without:
	$(PYTHON) -m tools.without $(PLUGIN)

# A wheel must hold all it needs: build it, install it in an empty environment, and run the demo and all suites with it.
wheel-check: docs
	PYTHON=$(PYTHON) sh tests/wheel_check.sh
