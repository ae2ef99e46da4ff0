# Each target works alone on a fresh clone: it creates .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
WORKERS ?= 2

.PHONY: quickstart test test-slow test-rivals lint format clean help

help:
	@echo "make quickstart   train softmax, SOFT++ and InLine on real images, with a report (2 minutes)"
	@echo "make test         the tests (minutes)"
	@echo "make test-slow    the slow ones (need a C++ compiler)"
	@echo "make test-rivals  comparison with other packages' implementations"
	@echo "make lint         ruff and mypy"
	@echo "make format       let ruff format the code"
	@echo "make clean        remove .venv"

quickstart: $(VENV)/installed-train
	$(BIN)/softline quickstart

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n $(WORKERS)

test-slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m slow

test-rivals: $(VENV)/installed-rivals
	$(BIN)/python -m pytest -m rivals

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "softline needs Python 3.11 or newer, got %d.%d: make PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-%: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e '.[$*]'
	@touch $@
