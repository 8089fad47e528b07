# Needs Python 3.10 or later with venv, make and git; works with GNU make 3.81 (macOS) and later.
PYTHON ?= python3
VENV = .venv
LAB_FLAGS ?=
PYTEST_FLAGS ?=
# CPU=1 installs PyTorch's build without CUDA, which on Linux is several times smaller. macOS and Windows get it anyway.
# Its index stands beside the usual one, which has the pinned releases of all else; pip takes 2.0+cpu to be above 2.0.
CPU ?=
CPU_TORCH := --extra-index-url https://download.pytorch.org/whl/cpu
# So many files of tests at a time; a file stays together, since its tests share what was dear to set up.
WORKERS ?= 2

BIN := $(VENV)/bin
# What a reader needs, and all that a contributor needs: `make lab` does not wait for the second.
FOR_LAB := $(VENV)/.installed-lab
FOR_ALL := $(VENV)/.installed-all
# JupyterLab asks each newcomer whether it may tell news, over the text. The book's own does not.
QUIET := $(VENV)/share/jupyter/lab/settings/overrides.json
COLAB := .venv-colab
FOR_COLAB := $(COLAB)/.made
# Kernels and shell commands inside a notebook find this environment's programs first.
IN_VENV := PATH="$(CURDIR)/$(BIN):$$PATH"
# Two OpenMP threads that spin beside a busy process make a step many times slower; waiting passively does not.
RUN_ENV := $(IN_VENV) OMP_WAIT_POLICY=passive
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt
# Jupyter refuses to run as root unless told that it is meant (containers, continuous integration).
AS_ROOT := $(shell [ "$$(id -u)" = 0 ] && echo --allow-root)

.DEFAULT_GOAL := help
.PHONY: help lab test check book colab format generated measured clean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

lab: $(FOR_LAB) $(QUIET) ## Open the book in JupyterLab (LAB_FLAGS="--no-browser --port=8899" starts it headless)
	$(RUN_ENV) jupyter-lab $(AS_ROOT) --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/chapters/index.ipynb $(LAB_FLAGS)

test: $(FOR_ALL) $(FOR_COLAB) ## Run everything that must hold: lint, types, generated files, all tests (PYTEST_FLAGS="-k kv", WORKERS=4)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(RUN_ENV) mypy
	$(RUN_ENV) minibatcher labs build --check
	$(RUN_ENV) python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_FLAGS)

# Every part runs, so that one round shows all there is to mend; the last line names the parts that failed.
check: $(FOR_ALL) ## Run what takes two to three minutes, before a commit: lint, types, generated files, quick tests
	@begun=$$(date +%s); failed=; \
	part() { echo "== $$*"; $(RUN_ENV) "$$@" || failed="$$failed, $$*"; }; \
	part ruff check .; \
	part ruff format --check .; \
	part mypy; \
	part minibatcher labs build --check; \
	part pytest -q -n $(WORKERS) --dist loadfile --durations=0 --durations-min=5 -m "not slow" $(PYTEST_FLAGS); \
	if [ -n "$$failed" ]; then echo "check: failed:$${failed#,}"; exit 1; fi; \
	echo "check: all is well, after $$(($$(date +%s) - begun)) s; make test runs the slow tests too"

book: $(FOR_ALL) ## Build the website of the book in build/book
	rm -rf build/book
	$(RUN_ENV) python -m sphinx -W --keep-going -q -c chapters . build/book
	@echo "The book is built: open build/book/index.html"

colab: $(FOR_ALL) $(FOR_COLAB) ## Run the set-up cell, a chapter and the widgets on the versions that Colab has (in .venv-colab)
	$(RUN_ENV) python -m pytest tests/test_colab.py $(PYTEST_FLAGS)

format: $(FOR_ALL) ## Format the code and mend what the linter can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generated: $(FOR_ALL) ## Rebuild what is generated: notebooks, and the computed parts of the pages
	$(RUN_ENV) minibatcher labs build

measured: $(FOR_ALL) ## Measure the comparison in the README again, three runs (minutes; needs a quiet machine)
	for run in 1 2 3; do $(RUN_ENV) minibatcher compare --strategies solo static continuous chunked --quiet \
		--json chapters/measured/comparison-$$run.json || exit; done
	$(RUN_ENV) minibatcher labs build --pages

clean: ## Remove the environments, what was built, and all caches
	[ ! -f "$(VENV)/pyvenv.cfg" ] || rm -rf "$(VENV)"
	rm -rf $(COLAB) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The lock keeps a class on identical versions; the environment is renewed when it or pyproject.toml changes.
$(FOR_LAB): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(0 if sys.version_info >= (3, 10) else "minibatcher needs Python 3.10 or later and this is " + v + ". Name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(if $(CPU),$(PIP_INSTALL) $(CPU_TORCH) torch)
	$(PIP_INSTALL) -e ".[lab,hub,gguf,gpu,serve]"
	@touch $@

$(QUIET): $(FOR_LAB)
	@mkdir -p $(dir $@)
	@echo '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": false}}' > $@

$(FOR_ALL): $(FOR_LAB)
	$(PIP_INSTALL) -e ".[lab,hub,gguf,gpu,serve,test,book,dev]"
	@touch $@

# It borrows PyTorch and more from the main environment, so it is made anew with it.
$(FOR_COLAB): $(FOR_ALL) tests/colab-requirements.txt tests/colab_environment.py
	$(BIN)/python tests/colab_environment.py $(COLAB)
	@touch $@
