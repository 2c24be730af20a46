# Every target sets up what it needs: Python 3.11+ and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
AXE := $(VENV)/axe.min.js
# Compiled code is kept, also where the machine says otherwise: without it every process compiles torch's source anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: test test-all lint demo docs bench attack format clean screenshot
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Quell needs Python 3.11 or newer: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	touch $(STAMP)

# The accessibility checker of the page's tests, which are skipped where there is no npm to get it from.
$(AXE): $(STAMP)
	cd $(VENV) && npm pack --silent --fetch-retries=0 --fetch-timeout=20000 axe-core@4.14.0 > /dev/null 2>&1 && tar xzf axe-core-4.14.0.tgz --strip-components=1 package/axe.min.js \
	  && touch axe.min.js || echo "axe-core cannot be had from npm: accessibility tests are skipped"

test: lint $(AXE)  ## linters, types, layering, tests and doctests (a few minutes)
	$(BIN)/python -m pytest -n auto --dist loadfile -m 'not slow'

test-all: lint $(AXE)  ## the same with the slow reproductions, and beside other libraries
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev,peers]'
	$(BIN)/python -m pytest -n auto

lint: $(STAMP)
	$(BIN)/ruff format --check src tests tools benchmarks experiments examples attacks
	$(BIN)/ruff check src tests tools benchmarks experiments examples attacks
	$(BIN)/mypy
	$(BIN)/lint-imports > $(VENV)/layers.log || (cat $(VENV)/layers.log; exit 1)

format: $(STAMP)
	$(BIN)/ruff format src tests tools benchmarks experiments examples attacks
	$(BIN)/ruff check --fix src tests tools benchmarks experiments examples attacks

demo: $(STAMP)  ## train on digits without privacy, with DP-SGD and as planned; verify the plan
	mkdir -p demo
	$(BIN)/python examples/digits.py demo/digits.npz
	rm -rf demo/digits-private
	$(BIN)/quell train demo/digits.npz --classes 10 --epochs 5 --batch-size 24 --epsilon 8 --delta 1e-4 --baselines --runs 3 --seed 0 --out demo/digits-private --plot demo/training.png
	$(BIN)/quell verify demo/digits-private/trial-plan.json
	@echo "Look at demo/digits-private/page.html and demo/training.png"

bench: $(STAMP)
	$(BIN)/python benchmarks/core.py
	$(BIN)/python benchmarks/strategies.py --quick
	$(BIN)/python benchmarks/accounting.py --quick
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/noise_cpu.py
	$(BIN)/python benchmarks/torch_step.py --models cnn --rounds 5

attack: $(STAMP)  ## try to break every promise; writes attacks/results.md (about 20 minutes)
	$(BIN)/python -m attacks --write

docs: $(STAMP)  ## docs/api.md, from the docstrings, and the site: open site/index.html
	$(BIN)/python -m tools.api
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

screenshot: demo  ## the pictures of the pages in docs/images; needs Chromium
	$(BIN)/python -m tests.page.screenshot docs/images demo/digits-private/page.html

clean:
	rm -rf $(VENV) demo site .pytest_cache .mypy_cache .ruff_cache .hypothesis
