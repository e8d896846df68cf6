# make report   from a fresh machine to a saved report      make test       the default suite
# make lab      JupyterLab on the notebooks                 make test-all   every generated case
# make bench    the performance benchmarks, measured here; records and pages in experiments/
# make lint     ruff check, ruff format --check and mypy    make types      mypy alone
# make drift    the newest releases of other systems against our replays; installs them, writes experiments/drift/drift.json
# make engines  an environment for each system of engines/ (gigabytes)   make test-engines   tests that run these systems
# make engine-matrix  invariants of these systems and of torch, measured; record and page in experiments/engine_matrix
# make test-slurm   tests on a real Slurm of two emulated nodes; installs Debian's packages, as root
# make chaos    a campaign of kills, full disks and malformed files (SEED=1 MINUTES=30); its record is in experiments/chaos
# make docs     the manual as a searchable site in docs/_build/html, with executed notebooks (DOCS_NOTEBOOKS=off: without outputs)
# make test-matrix          the default suite in every environment of tests/README.md; hours (ONLY="sigint load")
#
# PYTHON=python3.12       another interpreter (3.11 to 3.13)
# TORCH_INDEX=<address>   where torch comes from, such as an index of CPU builds (a fifth of the size)
# PYTEST="-k sharding"    more arguments for pytest
# WORKERS=0               make test in this process; the default is 4 workers, which take whole files in turn: on two cores
#                         three of them left an eighth of the time unused, and two a third

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
WORKERS ?= 4
ABLATION ?= experiments/layout_parity/ablation.yaml

SEED ?= 1
MINUTES ?= 30

# Keep byte code, also where the environment says not to (images of containers do): else every process of a report or of
# the suite, some thousands, compiles the package again, and every worker rewrites the asserts of all tests
export PYTHONDONTWRITEBYTECODE :=

ENGINES ?= $(basename $(notdir $(wildcard engines/*.txt)))

.PHONY: report chaos test test-all test-slurm test-engines engines engine-matrix test-matrix drift lab bench lint types docs clean
.DEFAULT_GOAL := report

report: .venv/.installed
	$(BIN)/python -m workbench run $(ABLATION)

lab: .venv/.installed
	$(BIN)/python -m workbench lab

bench: .venv/.installed
	$(BIN)/python -m workbench bench

test: .venv/.installed-dev browser
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST)

test-all: .venv/.installed-dev browser
	$(BIN)/python -m pytest -m "not engines and not slurm" $(PYTEST)

test-slurm: slurm .venv/.installed-dev
	$(BIN)/python -m pytest -m slurm tests/slurm $(PYTEST)

chaos: .venv/.installed-dev
	$(BIN)/python -m tests.chaos.campaign --seed $(SEED) --minutes $(MINUTES) $(if $(ONLY),--only $(ONLY))

engines: $(ENGINES:%=.engines/%/.installed)

test-engines: .venv/.installed-dev engines
	$(BIN)/python -m pytest -m engines tests/engines $(PYTEST)

drift: .venv/.installed .engines/drift/.installed
	$(BIN)/python -m experiments.drift.measure
	$(BIN)/python -m experiments.summary

engine-matrix: .venv/.installed-dev engines
	$(BIN)/python -m experiments.engine_matrix.measure --workers 2

test-matrix: .venv/.installed-dev browser
	tests/matrix.sh $(ONLY)

lint: .venv/.installed-dev
	$(BIN)/python -m ruff check workbench tests notebooks experiments docs
	$(BIN)/python -m ruff format --check workbench tests notebooks experiments docs
	$(BIN)/python -m mypy

types: .venv/.installed-dev
	$(BIN)/python -m mypy

docs: .venv/.installed-docs
	$(BIN)/python -m experiments.summary
	$(BIN)/python -m sphinx -W --keep-going -b html -c docs -d docs/_build/doctrees . docs/_build/html

clean:
	rm -rf .venv .engines .pytest_cache .ruff_cache .hypothesis docs/_build docs/reference/api
	find workbench tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and exactly: a looser request could pull another build of it
.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) -e .
	@touch $@

# Then the package and the tests are compiled once, and not by every worker at the same time
.venv/.installed-dev: .venv/.installed
	$(PIP) -e '.[dev]'
	-@$(BIN)/python -m pytest --collect-only -q -n 0 >/dev/null
	@touch $@

.venv/.installed-docs: .venv/.installed
	$(PIP) -e '.[docs]'
	@touch $@

# The package itself is not installed there: scripts find it on PYTHONPATH, as its recorder needs torch alone
.engines/%/.installed: engines/%.txt | .venv/bin/python
	"$(PYTHON)" -m venv .engines/$*
	.engines/$*/bin/python -m pip --disable-pip-version-check install -c engines/$*.txt \
	  $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch setuptools wheel ninja
	.engines/$*/bin/python -m pip --disable-pip-version-check install --no-build-isolation -r engines/$*.txt
	@touch $@

# Debian keeps ensurepip in a package of its own
.venv/bin/python:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "There is no '$(PYTHON)' here. Install Python 3.11, 3.12 or 3.13, or set PYTHON=/path/to/python." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "$(PYTHON) is $$("$(PYTHON)" -V 2>&1). The workbench needs Python 3.11, 3.12 or 3.13:" >&2; \
	  echo "set it, for example  make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  package="python$$("$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"; \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update && apt-get install -y --no-install-recommends "$$package"; \
	  else \
	    echo "$(PYTHON) cannot make virtual environments: install $$package (apt-get install $$package)." >&2; exit 1; \
	  fi; }
	rm -rf .venv
	"$(PYTHON)" -m venv .venv

# Tests in a real browser. Without root they are skipped, with a line that says so. Its driver, a node, needs libatomic1,
# which comes with gcc
.PHONY: browser
browser: .venv/.installed-dev
	@packages=$$($(BIN)/python -c 'from tests.helpers.chromium import missing; print(missing())'); [ -z "$$packages" ] || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update && apt-get install -y --no-install-recommends $$packages \
	      || echo "$$packages could not be installed; the tests in a browser will be skipped."; \
	  else \
	    echo "No $$packages here and no root to install it: the tests in a browser will be skipped."; \
	  fi; }

.PHONY: slurm
slurm:
	@[ "$$(id -u)" = 0 ] || { echo "make test-slurm starts the daemons of a cluster: run it as root." >&2; exit 1; }
	@(for program in slurmctld slurmd slurmdbd munged mariadbd; do command -v $$program >/dev/null || exit 1; done) || { \
	  apt-get update && apt-get install -y --no-install-recommends slurm-wlm slurmdbd munge mariadb-server; }
