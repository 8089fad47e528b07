# Needs Python 3.10 or later with venv, make and git; works with GNU make 3.81 (macOS) and later.
PYTHON ?= python3
VENV ?= .venv
LAB_FLAGS ?=
PYTEST_FLAGS ?=
# CPU=1 installs PyTorch's build without CUDA, which on Linux is several times smaller. macOS and Windows get it anyway.
CPU ?=
CPU_TORCH := --index-url https://download.pytorch.org/whl/cpu
# So many files of tests at a time; a file stays together, since its tests share what was dear to set up.
WORKERS ?= 2

BIN := $(VENV)/bin
# What a reader needs, and all that a contributor needs: `make lab` does not wait for the second.
FOR_LAB := $(VENV)/.installed-lab
FOR_ALL := $(VENV)/.installed-all
COLAB := .venv-colab
# Kernels and shell commands inside a notebook find this environment's programs first.
IN_VENV := PATH="$(CURDIR)/$(BIN):$$PATH"
# Two OpenMP threads that spin beside a busy process make a step many times slower; waiting passively does not.
RUN_ENV := $(IN_VENV) OMP_WAIT_POLICY=passive
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# Jupyter refuses to run as root unless told that it is meant (containers, continuous integration).
AS_ROOT := $(shell [ "$$(id -u)" = 0 ] && echo --allow-root)

.DEFAULT_GOAL := help
.PHONY: help lab test check book colab format generated clean

help: ## Print this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

lab: $(FOR_LAB) ## Open the book in JupyterLab (LAB_FLAGS="--no-browser --port=8899" starts it headless)
	$(RUN_ENV) jupyter-lab $(AS_ROOT) --LabApp.news_url=None --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/chapters/index.ipynb $(LAB_FLAGS)

test: $(FOR_ALL) ## Run everything that must hold: lint, types, generated files, all tests (PYTEST_FLAGS="-k kv", WORKERS=4)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(RUN_ENV) mypy
	$(RUN_ENV) minibatcher labs build --check
	$(RUN_ENV) python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_FLAGS)

# Every part runs, so that one round shows all there is to mend; the last line names the parts that failed.
check: $(FOR_ALL) ## Run what takes two minutes, before a commit: lint, types, generated files, quick tests
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

colab: $(FOR_ALL) ## Run the widgets and a chapter on the IPython and ipywidgets that Colab has (in .venv-colab)
	$(PYTHON) -m venv .venv-colab
	.venv-colab/bin/python -m pip install --disable-pip-version-check ipython==7.34.0 ipywidgets==7.7.1 anywidget \
		hypothesis pytest setuptools jinja2 matplotlib numpy tqdm
	.venv-colab/bin/python -m pip install --disable-pip-version-check --no-deps -e .
	.venv-colab/bin/python -m pytest tests/test_widgets.py tests/test_live.py $(PYTEST_FLAGS)

format: $(FOR_ALL) ## Format the code and mend what the linter can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generated: $(FOR_ALL) ## Rebuild what is generated: notebooks, and the computed parts of the pages
	$(RUN_ENV) minibatcher labs build

clean: ## Remove the environments, what was built, and all caches
	rm -rf $(VENV) $(COLAB) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The lock keeps a class on identical versions; the environment is renewed when it or pyproject.toml changes.
$(FOR_LAB): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(0 if sys.version_info >= (3, 10) else "minibatcher needs Python 3.10 or later and this is " + v + ". Name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(if $(CPU),$(PIP_INSTALL) $(CPU_TORCH) torch)
	$(PIP_INSTALL) -e ".[lab,hub,gguf,gpu]"
	@touch $@

$(FOR_ALL): $(FOR_LAB)
	$(PIP_INSTALL) -e ".[lab,hub,gguf,gpu,test,book,dev]"
	@touch $@
