# `make demo` and `make test` each do everything, from a fresh clone: no other step is needed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEV    := $(VENV)/.installed-dev
DEMO   := $(VENV)/.installed-demo
PEERS  := .venv-peers
PLAYGROUND := playground/node_modules/.installed
INPUTS := pyproject.toml constraints.txt

# The demo needs less than the tests do; where the larger set is installed it serves both.
READY_FOR_DEMO := $(if $(wildcard $(DEV)),$(DEV),$(DEMO))

# Two workers on few cores: more threads than one each only slow each other down.
# loadfile keeps the examples of one documentation page, which share a namespace, on one worker.
WORKERS ?= 2
PYTEST  := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup setup-demo demo test test-fast test-slow test-browser test-transformers test-adapters notebooks test-notebooks dist test-dist mutants lint typecheck format docs playground test-playground bench bench-peers try-peers clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(DEV) ## make .venv and install everything for development

setup-demo: $(READY_FOR_DEMO) ## make .venv and install what the demo needs

demo: $(READY_FOR_DEMO) ## train, fit, tune, and write the report
	$(BIN)/lapwing demo

test: lint typecheck test-fast ## linter, type checker, fast tests, documentation examples

test-fast: $(DEV) ## fast tests and documentation examples only
	$(PYTEST)

test-slow: $(DEV) ## slow and statistical tests
	$(PYTEST) -m "slow or statistical" tests

test-browser: $(DEV) ## open the report, the playground and every page of the site in Chromium (needs chromium)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser tests

dist: $(DEV) ## build the wheel and the source distribution into dist/, and check their metadata (installs the extra release first)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,release]'
	rm -rf dist
	$(BIN)/python -m build --no-isolation -o dist .
	$(BIN)/twine check --strict dist/*

test-dist: dist ## what is in them, and the wheel in a fresh environment
	$(BIN)/python -m pytest -m dist tests/tools/test_distribution.py

mutants: $(DEV) ## plant mistakes in the numerical core, and see which test finds each (hours; resumable)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m tools.mutants

test-transformers: $(DEV) ## Hugging Face architectures (installs the extra hf first)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,hf]'
	$(PYTEST) -m transformers tests/behaviour/test_transformers.py

test-adapters: $(DEV) ## Lightning, Hugging Face Trainer, BoTorch, ONNX (installs their extras first)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,lightning,hf,botorch,export]'
	$(PYTEST) -m adapters tests/integrations
	LAPWING_ADAPTERS=1 $(PYTEST) docs/lightning.md docs/hugging-face.md docs/botorch.md docs/export.md docs/tutorials/lora.md

notebooks: $(DEV) ## execute the notebooks and write their pages into docs/notebooks (minutes; installs their extras first)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,hf,botorch,jobs]'
	OMP_NUM_THREADS=1 $(BIN)/python tools/notebooks.py

test-notebooks: $(DEV) ## execute every notebook, writing nothing (minutes; installs their extras first)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,hf,botorch,jobs]'
	$(PYTEST) -m notebooks tests/docs/test_notebooks.py

lint: $(DEV) ## linter and formatter, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(DEV) ## type checker
	$(BIN)/mypy

format: $(DEV) ## sort imports, fix what is safe to fix, format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV) ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

playground: $(PLAYGROUND) ## check the playground and build docs/playground/page.html (needs node)
	cd playground && npm run check && npm test && npm run build

test-playground: $(PLAYGROUND) ## the playground against Lapwing's numbers, and its page against its sources (needs node)
	cd playground && npm run check && npm test && PLAYGROUND_OUT=node_modules/.built npm run build
	cmp playground/node_modules/.built/page.html docs/playground/page.html

bench: $(DEV) ## time and memory against a gradient epoch and a forward pass
	$(BIN)/lapwing bench

bench-peers: $(PEERS)/.installed ## the same for other libraries, in an environment of their own
	OMP_NUM_THREADS=1 $(PEERS)/bin/python bench_peers/run.py

try-peers: $(DEV) $(PEERS)/.installed ## what Lapwing and other libraries do when asked, each wish tried once
	OMP_NUM_THREADS=1 $(BIN)/python bench_peers/tried.py lapwing
	for library in laplace-torch lightning-uq-box torch-uncertainty; do OMP_NUM_THREADS=1 $(PEERS)/bin/python bench_peers/tried.py $$library; done

clean: ## remove what the other targets made, except .venv
	rm -rf site dist lapwing-report bench-results mutants-results .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find src tests docs examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(DEV): $(INPUTS) | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

$(PLAYGROUND): playground/package-lock.json
	cd playground && npm ci
	@touch $@

$(DEMO): $(INPUTS) | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e '.[demo]'
	@touch $@

# --no-deps: what they require is in requirements.txt, with the torch that is installed.
$(PEERS)/.installed: bench_peers/requirements.txt bench_peers/libraries.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -r bench_peers/requirements.txt
	$(PEERS)/bin/python -m pip install --no-deps -r bench_peers/libraries.txt
	@touch $@
