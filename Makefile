# make demo   set up, run the demo, show its results; with KEEP=1 its page stays open
# make test   set up, run the fast tests: 2.5 minutes on 2 cores; .ci/run runs all
# make chaos  1,000 kills and faults, within an hour on 2 cores; rows in runs/, and with ROWS=FILE there; then 19,500 random training steps
# make dist   a wheel in dist/, to install on other machines; make release checks and makes what is published
# make rows   run the committed list of long trials at low priority on one core; DATA=DIR has their data
# make site   docs/ as a site, in .site
# make test-arm64   the device's side on aarch64, emulated; as root, with debootstrap and qemu-user-static
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TORCH  := torch==2.13.0
HTTPX2 := httpx2==2.16.2 httpcore2==2.16.2 truststore==0.10.5
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo rows dist release test runtime test-integration test-httpx2 test-slow test-zoo chaos test-arm64 check format setup builtin demo-seeds results pictures site clean

demo: $(VENV)/.demo
	$(BIN)/python -m benchmarks.demo $(if $(KEEP),--keep)

test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal

# Packages for pages in browsers: training, and checking signatures.
runtime: setup
	$(BIN)/sparrow web

# Tests choose one of each kind of similar cases, such as methods; with ALL=1 they test all.
export TEST_ALL := $(ALL)

# Tests start hundreds of processes, each of which would compile our modules again.
export PYTHONDONTWRITEBYTECODE :=

# Real coordinators, devices, browsers, databases and shells; whole federations in one process; installations. Tests wait
# for programs that they start, so three run on two cores.
test-integration: runtime
	$(BIN)/python -m pytest -n $$((($$(nproc) * 3 + 1) / 2)) --dist worksteal -m 'integration and not slow'

# Tests that need an idle machine: they measure time and memory, or wait for deadlines of seconds.
test-slow: runtime
	$(BIN)/python -m pytest -m slow --ignore tests/system/test_zoo.py

# Not in CI: the fast tests with httpx2. It is used if installed, so it has a separate folder here, and other tests use httpx.
test-httpx2: setup
	$(PIP) --upgrade --no-deps --target runs/httpx2 $(HTTPX2)
	PYTHONPATH=$(CURDIR)/runs/httpx2 $(BIN)/python -m pytest -n auto --dist worksteal

# Popular models of torchvision, timm and transformers, and adapters of peft, which setup does not install.
test-zoo: setup
	$(PIP) --constraint constraints.txt --editable '.[adapters,zoo]' torchvision==0.28.0
	$(BIN)/python -m pytest -n auto --dist worksteal -m slow tests/system/test_zoo.py

# Not in CI, which runs one federation of each kind. MORE=--resume continues after the existing rows; MORE=--help lists the options.
chaos: setup
	$(BIN)/python -m tests.system.chaos --rows $(or $(ROWS),runs/chaos.jsonl) $(MORE)
	$(BIN)/python -m tests.graph_fuzzing --graphs 19500 --seed 1000

# Not in CI: the first run takes 10 minutes and downloads 250 MB.
test-arm64: setup
	$(BIN)/python tests/arm64/run.py

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# A section of docs/results/defaults.md: the demo over five seeds.
demo-seeds: setup
	$(BIN)/python -m benchmarks.demo_seeds

# Takes hours to weeks. Ctrl-C stops it, and the same command resumes it. Commit the rows in benchmarks/rows.
rows: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks queue --data $(or $(DATA),$(error DATA=DIR says where the data are))

# The generated sections and pictures of docs/results, from committed rows.
results: setup
	$(BIN)/python -m benchmarks claims --pictures

# The pictures of README. Needs Chromium.
pictures: setup
	$(BIN)/python docs/pictures.py

# Files of an earlier build would be included in the wheel, and an old egg-info here hides an installation's entry points. No set-up is needed, because no module of the project is imported.
dist:
	rm -rf build dist
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	rm -rf build *.egg-info

# A release of the version in setup.py, from a clean tree: both archives in dist/, tested in a new environment, and notes.
release: setup
	$(PIP) build twine
	$(BIN)/python .ci/release.py

# Fails on broken links; tests/docs finds most of them earlier.
site: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The manifests and graphs of built-in tasks, after a change of their models.
builtin: setup
	$(BIN)/python -m edge_sdk.publishing.write_builtin

setup: $(READY)

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit("Sparrow needs Python 3.10 to 3.14, this is " + sys.version.split()[0] + \
	  ": make PYTHON=python3.11") if not (3, 10) <= sys.version_info[:2] <= (3, 14) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	touch $@

# The packages of the demo: a small part of the tests' packages, without PyTorch.
$(VENV)/.demo: $(VENV)/.made pyproject.toml setup.py constraints.txt
	$(PIP) --constraint constraints.txt --editable '.[demo]'
	touch $@

# torch is installed first and pinned, because the newest build would add gigabytes of CUDA.
$(VENV)/.torch: | $(VENV)/.made
	$(PIP) $(TORCH)
	touch $@

$(READY): $(VENV)/.torch pyproject.toml setup.py constraints.txt
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) .arm64 .site runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
