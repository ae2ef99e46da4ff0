# Each target works alone on a fresh clone: it creates .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
WORKERS ?= 2

.PHONY: quickstart test test-slow test-rivals test-browser docs lint format clean help

help:
	@echo "make quickstart   train softmax, SOFT++ and InLine on real images, with a report (2 minutes)"
	@echo "make test         the tests (minutes)"
	@echo "make test-slow    the slow ones (need a C++ compiler)"
	@echo "make test-rivals  comparison with other packages' implementations"
	@echo "make test-browser the explorer in a real browser (installs Debian's chromium where it can)"
	@echo "make docs         the documentation, to site/index.html"
	@echo "make lint         ruff and mypy"
	@echo "make format       let ruff format the code"
	@echo "make clean        remove .venv"

quickstart: $(VENV)/installed-train
	$(BIN)/softline quickstart

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n $(WORKERS)

test-slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m "slow and not browser"

test-rivals: $(VENV)/installed-rivals
	$(BIN)/python -m pytest -m rivals

test-browser: $(VENV)/installed-browser
	@[ -n "$$SOFTLINE_CHROMIUM" ] || command -v chromium || command -v chromium-browser || command -v google-chrome || \
	  { apt-get update && apt-get install -y --no-install-recommends chromium; }
	$(BIN)/python -m pytest -m "browser and not slow"

# material's notice that it ends in 2027 is no warning of ours
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

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
