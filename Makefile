# Needs Python 3.10 or later with venv, make and git; works with GNU make 3.81 (macOS) and later.
PYTHON ?= python3
VENV ?= .venv
LAB_FLAGS ?=
PYTEST_FLAGS ?=
# So many files of tests at a time; a file stays together, since its tests share what was dear to set up.
WORKERS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := lab,test,hub,gguf,gpu,dev
# Kernels and shell commands inside a notebook find this environment's programs first.
IN_VENV := PATH="$(CURDIR)/$(BIN):$$PATH"
# Two OpenMP threads that spin beside a busy process make a step many times slower; waiting passively does not.
RUN_ENV := $(IN_VENV) OMP_WAIT_POLICY=passive
# Jupyter refuses to run as root unless told that it is meant (containers, continuous integration).
AS_ROOT := $(shell [ "$$(id -u)" = 0 ] && echo --allow-root)

.DEFAULT_GOAL := help
.PHONY: help lab test colab format labs clean

help: ## Print this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

lab: $(STAMP) ## Open the book in JupyterLab (LAB_FLAGS="--no-browser --port=8899" starts it headless)
	$(RUN_ENV) jupyter-lab $(AS_ROOT) --LabApp.news_url=None --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/chapters/index.ipynb $(LAB_FLAGS)

test: $(STAMP) ## Run everything that must hold: lint, format, generated notebooks, tests (PYTEST_FLAGS="-k kv", WORKERS=4)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(RUN_ENV) minibatcher labs build --check
	$(RUN_ENV) python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_FLAGS)

colab: ## Build every widget with the IPython and ipywidgets that Colab has (in .venv-colab, without PyTorch)
	$(PYTHON) -m venv .venv-colab
	.venv-colab/bin/python -m pip install --disable-pip-version-check ipython==7.34.0 ipywidgets==7.7.1 anywidget \
		hypothesis pytest setuptools jinja2 matplotlib numpy tqdm
	.venv-colab/bin/python -m pip install --disable-pip-version-check --no-deps -e .
	.venv-colab/bin/python -m pytest tests/test_widgets.py tests/test_live.py $(PYTEST_FLAGS)

format: $(STAMP) ## Format the code and mend what the linter can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

labs: $(STAMP) ## Rebuild the generated notebooks from their Markdown sources
	$(RUN_ENV) minibatcher labs build

clean: ## Remove the environment and all caches
	rm -rf $(VENV) .venv-colab build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The lock keeps a class on identical versions; the environment is renewed when it or pyproject.toml changes.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(0 if sys.version_info >= (3, 10) else "minibatcher needs Python 3.10 or later and this is " + v + ". Name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@
