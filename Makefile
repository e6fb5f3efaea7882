# `make app` opens the workbench, `make test` runs every test; both set up what they need first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help app test faults lint models tables

help:  ## list these commands
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("the workbench needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

app: $(VENV)/.installed  ## open the workbench in a browser
	$(BIN)/workbench app

test: $(VENV)/.installed  ## run every test
	$(BIN)/pytest

faults: $(VENV)/.installed  ## the fault and fuzz tests at full count (minutes)
	WORKBENCH_FAULTS=full $(BIN)/pytest tests/faults

lint: $(VENV)/.installed  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

models: $(VENV)/.installed  ## retrain every shipped model from its recipe
	for name in $(patsubst models/%/model.safetensors,%,$(wildcard models/*/model.safetensors)); do \
	  WORKBENCH_RUNS=build/runs $(BIN)/workbench train $$name --resume && \
	  cp -r $$(ls -d build/runs/$$name/seed-0/* | grep -v recipe.toml) models/$$name/ || exit 1; \
	done

tables: $(VENV)/.installed  ## regenerate docs/results and docs/results.md
	$(BIN)/workbench table all --folder docs
