# Everything runs in a virtual environment of its own; nothing needs to be installed first but Python
# (3.11 or later) with pip. `make demo` and `make test` are all that a fresh clone needs.
#
#   make test PYTHON=python3.12 VENV=.venv312             another interpreter, beside the first
#   make test PYTHON=python3.12 VENV=.venv312-newest JAX= the newest jax that pip finds
#   make test ARGS='tests/models/test_cache.py -k ring'   some of the tests

PYTHON ?= python3
VENV ?= .venv
# The version of the GPU machines on Python 3.12, and 0.10.2 on 3.11. With 0.12, whose emitters of CPU code are
# slower, the tests compile for twice as long.
JAX ?= jax<0.12
ARGS ?=
PROMPT ?= def read_config(path):

BIN := $(VENV)/bin
HOLD = $(if $(JAX),'$(JAX)')
# torch, against which parity is tested, has a small CPU wheel in few places; elsewhere pip brings several
# GB of CUDA libraries with it. So only Python 3.11, the first one that is tested, gets it unasked.
ifeq ($(origin EXTRAS), undefined)
EXTRAS = $(shell $(BIN)/python -c 'import sys; print("test,oracle" if sys.version_info < (3, 12) else "test")')
endif

.PHONY: demo test lint types format docs clean
.NOTPARALLEL:

demo: $(VENV)/.installed
	$(BIN)/jaxspec generate '$(PROMPT)'

# Programs that one test compiled are loaded by later ones, and by the next run.
test: export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/out/jax-cache
test: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0.1
test: $(VENV)/.installed-test
	@$(BIN)/python -c 'import torch' 2>/dev/null || echo "No torch in $(VENV): the parity tests are skipped. EXTRAS=test,oracle installs it (several GB on some platforms)."
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.installed-dev
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The site, in out/site; a warning is an error. NO_MKDOCS_2_WARNING hides an advertisement.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) out build *.egg-info

# Debian keeps the module that puts pip into a new environment in a package of its own: without it, the
# interpreter's pip does that.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install pip; }

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[serve]' $(HOLD)
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]' $(HOLD)
	touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]' $(HOLD)
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]' $(HOLD)
	touch $@
