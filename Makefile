# make demo    set everything up in .venv, install qsim, run the main example
# make test    set everything up, then lint, build, and run all tests (C++, Python, CUDA compile check where nvcc is)
# make docs    the site, in build/site (opens without a network: build/site/index.html); pictures of reports where chromium is installed
# make wheel   dist/: an sdist, and from it a wheel for each Python here, tried in an environment of its own
# make bench   the benchmarks: ratios in one process, out/bench.json and its plot; five minutes
# make fuzz    a million inputs for each libFuzzer target, a million calls of operators (FUZZ_INPUTS=...), 20,000 programs (FUZZ_PROGRAMS=...), 1,000 sequences of calls (FUZZ_LIVES=...)
# make ptx     the PTX of the CUDA kernels on this machine, for five architectures; wants nvcc
# make aarch64 kernels and C++ tests for 64-bit ARM, under qemu; wants g++-aarch64-linux-gnu and qemu-user
# make test-cuda-torch   a CUDA build of torch without a GPU, in an environment of its own (some GB): all Python tests; scripts/test_torch.sh takes other versions
# Wants python3 (3.10 or newer), g++ and make; the rest is installed into .venv.
PYTHON ?= python3
QSIM_TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --no-compile# of 25,000 modules a few thousand are imported, which Python compiles then
SOURCES := $(shell git ls-files pyproject.toml CMakeLists.txt cmake csrc kernels python tools 2>/dev/null)
NVCC := $(shell command -v nvcc || ls /usr/local/cuda*/bin/nvcc 2>/dev/null | tail -n 1)
# Two workers: more only compete for the memory bandwidth that the kernels use. One thread each: more spin while they wait for a core.
NINJA_ALONE := MAKEFLAGS=  # or it asks for jobs of ours, of which it has none to take
# A worker takes half of the tests, then from the other's: what modules prepare for their tests is prepared once.
PYTEST := OMP_NUM_THREADS=1 PYTHONPATH=python $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test lint build test-cpp test-python audit compile-cuda sanitize fuzz ptx aarch64 test-cuda-torch bench docs wheel format clean

demo: $(VENV)/installed
	$(BIN)/python examples/digits_qat.py --output out

# Side by side, since some of these run on one core; what each says is shown when it is done. Then the Python tests, which read the docs.
test:
	$(MAKE) --jobs $(or $(shell nproc),2) --output-sync=target lint test-cpp audit compile-cuda sanitize docs
	$(PYTEST)

lint: build $(VENV)/tools  # the type checker wants the generated _build_info.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=python $(BIN)/lint-imports --no-cache --no-logo
	git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror

build: $(VENV)/compiling
	scripts/require_catch2.sh
	$(NINJA_ALONE) PATH="$(CURDIR)/$(BIN):$$PATH" scripts/develop.sh -DQSIM_CUDA=$(if $(NVCC),CHECK,OFF) $(if $(NVCC),-DCMAKE_CUDA_COMPILER=$(NVCC))

test-cpp: build
	$(BIN)/ctest --test-dir build/dev --output-on-failure -j 2

audit: build $(VENV)/tools
	scripts/audit_levels.sh build/dev
	scripts/audit_exports.sh build/dev/csrc/libqsim_ops*.so build/dev/csrc/_C.*.so
	$(if $(NVCC),scripts/audit_cuda_symbols.sh build/dev/csrc/libqsim_ops_cuda.so,@echo "skipped: no nvcc, CUDA sources not compiled")
	$(if $(NVCC),$(BIN)/python scripts/sass_budget.py build/dev,@echo "skipped: no nvcc, CUDA kernels not counted")

# The build compiles for the architectures that are tuned; these are the oldest and the newest. All: scripts/compile_cuda.sh
compile-cuda:
	$(if $(NVCC),NVCC=$(NVCC) scripts/compile_cuda.sh 75 120,@echo "skipped: no nvcc, CUDA sources not compiled")

sanitize: build
	$(NINJA_ALONE) PATH="$(CURDIR)/$(BIN):$$PATH" scripts/sanitize.sh

fuzz: build $(VENV)/tools
	scripts/require_clang.sh
	OMP_NUM_THREADS=1 PYTHONPATH=python:. $(BIN)/python -m tests.fuzz.programs --as-it-is --jobs 2 --count $(or $(FUZZ_PROGRAMS),20000)
	OMP_NUM_THREADS=1 PYTHONPATH=python:. $(BIN)/python -m tests.fuzz.programs.without
	OMP_NUM_THREADS=1 PYTHONPATH=python:. $(BIN)/python -m tests.fuzz.lives --count $(or $(FUZZ_LIVES),1000)
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/fuzz.sh $(or $(FUZZ_INPUTS),1000000)
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/fuzz_operators.sh $(or $(FUZZ_INPUTS),1000000)

ptx: $(VENV)/compiling
	scripts/require_catch2.sh
	PATH="$(CURDIR)/$(BIN):$$PATH" NVCC=$(NVCC) scripts/ptx.sh

aarch64: $(VENV)/compiling
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/aarch64.sh

test-cuda-torch:
	PYTHON=$(PYTHON) scripts/test_torch.sh torch==2.14.1

test-python: build $(VENV)/tools
	$(PYTEST)

docs: build $(VENV)/tools  # a warning is an error, and so is a dead link
	rm -rf docs/api/names build/site
	OMP_NUM_THREADS=1 PYTHONPATH=python $(BIN)/python docs/site/gallery.py docs/pictures
	PYTHONPATH=python $(BIN)/sphinx-build -q -E -W --keep-going -c docs/site -d build/site-trees . build/site
	$(BIN)/python docs/site/check_links.py build/site

wheel:
	scripts/wheels.sh

bench: $(VENV)/tools build
	PYTHONPATH=python $(BIN)/python benchmarks/run.py

format: $(VENV)/tools
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .
	git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs $(BIN)/clang-format -i

clean:
	rm -rf build dist $(VENV) out docs/api/names docs/pictures python/qsim/*.so python/qsim/_build_info.py

# ---- environments: torch first, then everything else under a constraint, so that nothing pulls another torch in
$(VENV)/torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=25.1"
	$(PIP) "$(QSIM_TORCH)"
	$(BIN)/pip freeze | grep '^torch==' | sed 's/+.*//' > $@

$(VENV)/installed: $(VENV)/torch $(SOURCES)
	$(PIP) --constraint $(VENV)/torch ".[examples]"
	touch $@

# What compiles comes first: the rest is unpacked on one core while the other one does.
$(VENV)/compiling: $(VENV)/torch pyproject.toml
	$(PIP) --constraint $(VENV)/torch --group build
	touch $@

$(VENV)/tools: $(VENV)/compiling
	$(PIP) --constraint $(VENV)/torch --group dev --group docs
	touch $@
