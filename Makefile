# Every target needs only Python 3.11 or newer and a C compiler: what it uses is
# installed into .venv, once. Nothing is installed outside this folder, apart from the
# model cache (~/.cache/sglang_tetris, or $SGLANG_TETRIS_CACHE).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet

# What the commands below pass on: make demo ARGS="--dtype float32"
ARGS ?=
PYTEST_ARGS ?=

.PHONY: help setup model demo test quality serve bench exactness simulate test-gpu
.DEFAULT_GOAL := help
# Two targets at once would build one .venv twice.
.NOTPARALLEL:

help:
	@echo "make demo       serve a real model with TETRIS and compare it"
	@echo "make test       every test that needs no GPU"
	@echo "make quality    lint, format and type checks"
	@echo "make serve      a TETRIS server in the foreground (ARGS: more flags)"
	@echo "make bench      the allocator on one core; TETRIS against SGLang in serving"
	@echo "make exactness  the full matrix: outputs with and without TETRIS"
	@echo "make simulate   any policy on recorded drafts, at any cost and load"
	@echo "make test-gpu   the tests that need an NVIDIA GPU"

$(PY):
	@test -n "$(PYTHON)" || { echo "No python3 found: install Python 3.11."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp is newer than pyproject.toml once everything in it has been installed.
$(VENV)/.quality: pyproject.toml | $(PY)
	$(PIP) install -e '.[quality]'
	@touch $@

$(VENV)/.setup: pyproject.toml | $(PY)
	@echo "Installing SGLang and its packages into $(VENV) (once: minutes, about 8 GB)"
	$(PIP) install -e '.[serve,test]'
	@touch $@

setup: $(VENV)/.setup

# Checks its own stamps: a second run reads a few small files.
model: setup
	@$(PY) -m sglang_tetris.tools.prepare_model

demo: model
	$(PY) examples/demo.py $(ARGS)

# Most of the time goes into starting servers, which keeps one core busy: two at once.
test: model
	$(PY) -m pytest -m "not gpu" -n 2 --dist loadgroup $(PYTEST_ARGS)

test-gpu: model
	$(PY) -m pytest -m gpu $(PYTEST_ARGS)

quality: $(VENV)/.quality
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

serve: model
	$(PY) -m sglang_tetris.tools.serve $(ARGS)

# ARGS are the second's; the first takes some 15 seconds.
bench: model
	OMP_NUM_THREADS=1 $(PY) benchmark/allocator/bench_select.py
	$(PY) benchmark/serving/run.py $(ARGS)

exactness: model
	$(PY) benchmark/exactness/run.py $(ARGS)

SIMULATOR := benchmark/simulator

simulate: setup
	$(PY) $(SIMULATOR)/calibration.py --output $(SIMULATOR)/results/calibration.json
	$(PY) -m sglang_tetris.tools.simulate \
	  $(SIMULATOR)/traces/smollm2-135m.replay.jsonl.gz \
	  --cost-table $(addprefix $(SIMULATOR)/cost_tables/,cpu-2core.json \
	  l4-llama-3b.json h100-llama-8b.json 4xh100-llama-70b.json) \
	  --budgets 1 2 3 4 --output $(SIMULATOR)/results/policies.json $(ARGS)
