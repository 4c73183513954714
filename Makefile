# What a person runs and what .ci/run runs. Needs Python 3.10-3.12, git and make; everything else is installed by pip
# into a virtual environment of its own.
#
#   make demo       trains a small network under O2 with the monitor on and shows what it found
#   make test       the test suite, with coverage
#   make test-all   the same and the slow tests: more networks of mindcv, worker processes, kernels compiled anew
#   make test-pure  the tests that need no MindSpore, in an environment without it (small and quick to install)
#   make campaigns  planted faults and damaged logs by the thousand; writes the result tables in docs/
#   make lint types format bench wheel clean
#
# PYTHON  the interpreter that makes the environment     make test PYTHON=python3.11
# VENV    another environment than .venv                 make test VENV=~/envs/ampdebug
# JOBS    test processes side by side                    make test JOBS=4
# ARGS    handed to pytest, the demo or the benchmark    make test ARGS="-k table"

PYTHON ?= python3
VENV ?= .venv
VENV_PURE ?= .venv-pure
ARGS ?=
JOBS ?= 2
MAKEFLAGS += --no-print-directory

# Our own commands must find the packages of the environment only, whatever the caller's shell has set.
unexport PYTHONPATH
unexport PYTHONHOME

PIP = -m pip install --quiet --disable-pip-version-check --no-input
# Networks to try the monitor on. What it declares would bring a numpy that MindSpore breaks on: without dependencies.
NET_ZOO = mindcv==0.3.0
DEV = $(VENV)/.ampdebug-dev
DEV_PURE = $(VENV_PURE)/.ampdebug-dev

.PHONY: all demo test test-all test-pure lint types format bench campaigns wheel env clean
all: lint types test

env: $(DEV)

# The stamp is newer than pyproject.toml: installed already. MindSpore is 2.8 GB, so that matters.
$(DEV): pyproject.toml
	@$(call make-venv,$(VENV))
	@echo "installing ampdebug and its tools into $(VENV) (MindSpore is large: minutes the first time)"
	@"$(VENV)/bin/python" $(PIP) --editable ".[dev]"
	@"$(VENV)/bin/python" $(PIP) --no-deps $(NET_ZOO)
	@touch "$@"

# Everything of the dev environment but MindSpore: the requirements are read from our own metadata, so that they stand in
# pyproject.toml only. Ours is installed last, or pip would call the missing MindSpore an error.
$(DEV_PURE): pyproject.toml
	@$(call make-venv,$(VENV_PURE))
	@echo "installing ampdebug without MindSpore into $(VENV_PURE)"
	@"$(VENV_PURE)/bin/python" $(PIP) --no-deps --editable .
	@"$(VENV_PURE)/bin/python" -c 'from importlib.metadata import requires; \
	  names = [line.split(";")[0].strip() for line in requires("ampdebug")]; \
	  print(*[name for name in names if not name.startswith(("mindspore", "ampdebug["))], sep="\n")' \
	  > "$(VENV_PURE)/requirements.txt"
	@"$(VENV_PURE)/bin/python" -m pip uninstall --quiet --yes ampdebug
	@"$(VENV_PURE)/bin/python" $(PIP) --requirement "$(VENV_PURE)/requirements.txt"
	@"$(VENV_PURE)/bin/python" $(PIP) --no-deps --no-build-isolation --editable .
	@touch "$@"

# One shell command: makes the environment $(1) unless it is there and has pip, and says what to do where it cannot.
# (Written for GNU make 3.81 too, which is the one on a Mac: no .ONESHELL.)
define make-venv
"$(1)/bin/python" -m pip --version >/dev/null 2>&1 || { \
  command -v "$(PYTHON)" >/dev/null || { \
    echo "make: PYTHON=$(PYTHON) is not found. Name a Python 3.10, 3.11 or 3.12: make PYTHON=python3.11" >&2; exit 2; }; \
  "$(PYTHON)" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' || { \
    echo "make: $(PYTHON) is $$("$(PYTHON)" --version 2>&1), but MindSpore has wheels for Python 3.10 to 3.12 only." \
      "Name one of these: make PYTHON=python3.11" >&2; exit 2; }; \
  "$(PYTHON)" -m venv "$(1)" || { \
    echo "make: $(PYTHON) cannot make a virtual environment (on Debian: apt install python3-venv)." >&2; exit 2; }; }
endef

demo: $(DEV)
	@"$(VENV)/bin/python" examples/digits_o2.py $(ARGS)

# A module's tests stay in one process (loadfile); $(JOBS) of them run side by side.
PYTEST = -m pytest --numprocesses $(JOBS) --dist loadfile

test: $(DEV)
	@"$(VENV)/bin/python" $(PYTEST) --cov --cov-report=term --durations=15 --durations-min=5 -m "not slow" $(ARGS)

test-all: $(DEV)
	@"$(VENV)/bin/python" $(PYTEST) --durations=15 $(ARGS)

test-pure: $(DEV_PURE)
	@"$(VENV_PURE)/bin/python" $(PYTEST) --ignore=tests/mindspore $(ARGS)

lint: $(DEV)
	@"$(VENV)/bin/python" -m ruff check .
	@"$(VENV)/bin/python" -m ruff format --check .

format: $(DEV)
	@"$(VENV)/bin/python" -m ruff check --fix .
	@"$(VENV)/bin/python" -m ruff format .

types: $(DEV)
	@"$(VENV)/bin/python" -m mypy

bench: $(DEV)
	@"$(VENV)/bin/python" benchmarks/monitor.py $(ARGS)

# Planted faults and mutated logs, whole; CI runs a small sample. Each writes its table into docs/. About an hour.
campaigns: $(DEV)
	@"$(VENV)/bin/python" benchmarks/diagnose_campaign.py 264 200 10000
	@"$(VENV)/bin/python" benchmarks/bisect_campaign.py

wheel: $(DEV)
	@rm -rf build dist
	@"$(VENV)/bin/python" -m build --no-isolation --wheel --outdir dist . >/dev/null
	@ls dist/*.whl

clean:
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis htmlcov .coverage .coverage.* *.egg-info
	@find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
