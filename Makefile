# Each target works alone on a fresh clone: it creates .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
WORKERS ?= 2
MINUTES ?= 60

.PHONY: quickstart test test-slow test-oldest campaign test-rivals test-browser docs lint format clean help

help:
	@echo "make quickstart   train softmax, SOFT++ and InLine on real images, with a report (2 minutes)"
	@echo "make test         the tests (minutes)"
	@echo "make test-slow    the slow ones (need a C++ compiler)"
	@echo "make test-oldest  the tests with the oldest versions of all dependencies, in an environment of its own"
	@echo "make campaign     adversarial tests for an hour: kills, damaged files, hostile inputs (MINUTES=60)"
	@echo "make test-rivals  comparison with other packages' implementations"
	@echo "make test-browser the explorer in a real browser (installs Debian's chromium where it can)"
	@echo "make docs         the documentation, to site/index.html"
	@echo "make lint         ruff and mypy"
	@echo "make format       let ruff format the code"
	@echo "make clean        remove .venv and .venv-oldest"

quickstart: $(VENV)/installed-train
	$(BIN)/softline quickstart

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n $(WORKERS)

test-slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m "slow and not browser"

# pytest's own warnings filter is for the newest versions; the command line and the explorer use what these tests do
OLDEST := weights tasks data backbones layers heads measure ops attention analysis engine/test_train.py \
  engine/test_recipes.py deploy/test_export.py deploy/test_graphs.py replacing linearizing test_dependencies.py
test-oldest: $(VENV)-oldest/installed
	$(VENV)-oldest/bin/python -m pytest -n $(WORKERS) -W default $(addprefix tests/,$(OLDEST))

campaign: $(VENV)/installed-dev
	$(BIN)/python -m tools.campaign --minutes $(MINUTES)

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
	rm -rf $(VENV) $(VENV)-oldest

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "softline needs Python 3.11 or newer, got %d.%d: make PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-%: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e '.[$*]'
	@touch $@

$(VENV)-oldest/installed: $(BIN)/python pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install --disable-pip-version-check -c constraints-oldest.txt -e '.[dev]'
	@touch $@
