# `make demo` and `make test` do all their own set-up in .venv and do nothing twice.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test lint types unit slow matrix slurm clean
install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "$(PYTHON) not found; give another with make PYTHON=..."; exit 1; }
	@echo "Installing into $(VENV) (a minute or two the first time) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pip setuptools wheel
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy packaging psutil py-cpuinfo pydantic ninja
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/refusion demo

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright

unit: $(STAMP)
	$(BIN)/python -m pytest -m "not slow and not matrix and not slurm"

# Tests that take long one by one: the commands of the pages, many kills, packages of others, a whole comparison.
slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

# Every layout of ranks against one process, of which `make test` runs a part.
matrix: $(STAMP)
	$(BIN)/python -m pytest -m matrix

# Training as jobs of a Slurm cluster that the tests start on this host; skipped where Slurm is not installed.
slurm: $(STAMP)
	$(BIN)/python -m pytest -rs -m slurm

clean:
	rm -rf $(VENV) build *.egg-info
