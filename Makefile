# Needs make and Python 3.11 or newer with venv; everything else comes from pip.
#
#   make help            print this text
#   make demo            install into .venv (without torch), then run the demonstration into out/
#   make static          install into .venv-test, then format, lint, types, import contracts
#   make check           the same, and the quick tests
#   make test            make static, and all tests but the slow ones
#   make test-slow       the slow ones: a long random run, the notebooks, installations, rebuilt pages,
#                        and full memory or disk
#   make matrix          repeat the tests with other processor features, thread counts, locales, terminals
#   make clean           remove the environments, out/ and all caches
#
# Measurements, each of which writes a page of docs/ or prints its figures:
#
#   make bench           time the simulator against a bare SimPy loop, and preparation against plain work
#   make million         a million tokens, 5 budgets x 8 policies, through the fast engine (DATA: the routing)
#   make fidelity        simulation beside measurement: docs/fidelity.md anew
#   make soak            half an hour of random replays and texts on this machine
#   make memory          what takes how much memory while a model writes: docs/memory.md anew
#   make peers           tokens/s of CRISP and of others under one memory cap: docs/peers.md anew (root)
#   make quality         what widths cost in quality: docs/quality.md anew (DATA: the texts)
#   make policies        what policies load and lose on the small models: docs/policies.md (DATA: the texts)
#   make models          every family of models through every command: the table of docs/models.md
#   make quantised       reading quantised checkpoints: docs/quantised.md (DATA: the texts)
#   make caches          caches, prefetchers and orders side by side: docs/caches.md (DATA: a trace)
#   make logs            an engine's figures reproduced from its logs: docs/logs.md (DATA: the logs)
#   make kernels-report  compile the GPU kernels for four architectures, without one: docs/kernels.md
#   make gpu-report      every check that needs a GPU, with what PYTHON has; installs nothing: out/gpu/
#   make gpu-bundle      the same as a folder to take to such a machine: out/gpu-bundle/
#
# Variables: PYTHON=python3.12 chooses the interpreter, DATA=DIR the folder of large test inputs.

PYTHON ?= python3
# The folder of large test inputs; without one, the tests that need it are skipped.
DATA ?= $(wildcard ../shared)

# -qq hides pip's progress and advice, not its errors. Python compiles what it imports; to compile
# all that is installed doubled the install's processor time (156 s, and 79 s without).
PIP_FLAGS := -qq --disable-pip-version-check --no-input --no-compile -c constraints.txt
TEST := .venv-test/bin
PYTEST := $(TEST)/pytest -n auto --dist loadfile --no-loadscope-reorder $(if $(DATA),--data=$(DATA))
SOURCES := $(shell find -L crisp traces -name __pycache__ -prune -o -type f -print)

.PHONY: demo help check static test test-slow matrix bench million fidelity memory peers soak kernels-report gpu-report gpu-bundle quality policies caches logs models quantised clean
.DELETE_ON_ERROR:

demo: .venv/installed
	.venv/bin/crisp demo

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# Without the large inputs. A test that is named at the end takes too long: mark it `seconds`.
check: static
	$(TEST)/pytest -n auto --dist loadfile --quick --durations=10 --durations-min=2

test: static
	$(PYTEST) -m "not slow"

test-slow: .venv-test/installed
	$(PYTEST) -m slow

static: .venv-test/installed
	$(TEST)/ruff format --check .
	$(TEST)/ruff check .
	$(TEST)/mypy
	$(TEST)/lint-imports --no-logo

matrix: .venv-test/installed
	$(TEST)/python tests/matrix.py $(if $(DATA),--data=$(DATA))

bench: .venv-test/installed
	$(TEST)/python benchmarks/bench.py
	$(TEST)/python benchmarks/preparation.py
	$(TEST)/python benchmarks/compute.py
	$(TEST)/python benchmarks/deciding.py

million: .venv-test/installed
	$(TEST)/python benchmarks/million.py $(if $(DATA),--data $(DATA))

fidelity: .venv-test/installed
	$(TEST)/python benchmarks/fidelity

memory: .venv-test/installed
	$(TEST)/python benchmarks/memory.py

peers: .venv-peers/installed
	.venv-peers/bin/python benchmarks/peers

gpu-report:
	$(PYTHON) benchmarks/gpu

# The sources and what they need that is pure Python; torch, triton, numpy, safetensors and xxhash
# are the other machine's.
gpu-bundle:
	rm -rf out/gpu-bundle
	mkdir -p out/gpu-bundle/benchmarks
	cp -RL crisp out/gpu-bundle/
	cp -R benchmarks/gpu out/gpu-bundle/benchmarks/
	@$(PYTHON) -m pip install $(PIP_FLAGS) --no-deps --target out/gpu-bundle/carried simpy nvidia-ml-py
	@echo "there: python3 benchmarks/gpu --carried carried"

soak: .venv-test/installed
	$(TEST)/python benchmarks/soak.py

kernels-report: .venv-test/installed
	$(TEST)/python benchmarks/kernels

quality: .venv-test/installed
	$(TEST)/python benchmarks/quality $(if $(DATA),--data $(DATA))

policies: .venv-test/installed
	$(TEST)/python benchmarks/policies $(if $(DATA),--data $(DATA))

models: .venv-test/installed
	$(TEST)/python benchmarks/models

caches: .venv-test/installed
	$(TEST)/python benchmarks/caches $(if $(DATA),--data $(DATA))

logs: .venv-test/installed
	$(TEST)/python benchmarks/logs $(if $(DATA),--data $(DATA))

quantised: .venv-test/installed
	$(TEST)/python benchmarks/quantised $(if $(DATA),--data $(DATA))

clean:
	rm -rf .venv .venv-test .venv-peers out dist build
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What a user gets from a package index: a built wheel, without extras.
.venv/installed: pyproject.toml hatch_build.py constraints.txt $(SOURCES)
	$(call environment,.venv)
	@echo "Installing CRISP into .venv (a minute or two, from the package index) ..."
	@.venv/bin/python -m pip install $(PIP_FLAGS) .
	@touch $@

# What a developer has: the checkout itself, with every tool.
.venv-test/installed: pyproject.toml constraints.txt
	$(call environment,.venv-test)
	@echo "Installing CRISP and its test tools into .venv-test (some minutes, from the package index) ..."
	@$(TEST)/python -m pip install $(PIP_FLAGS) -e '.[eval,dev]'
	@touch $@

# What is compared with: none of it is a dependency. xllamacpp is llama.cpp, prebuilt.
.venv-peers/installed: pyproject.toml constraints.txt
	$(call environment,.venv-peers)
	@echo "Installing CRISP and its peers into .venv-peers (some minutes, from the package index) ..."
	@.venv-peers/bin/python -m pip install $(PIP_FLAGS) -e '.[hf]' 'accelerate>=1' gguf xllamacpp==2026.10.11549
	@touch $@

# The environment in folder $(1), made if it is not there (or was left half made).
define environment
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
  "error: PYTHON=$(PYTHON) is not Python 3.11 or newer; say which one is: make PYTHON=python3.12" >&2; exit 1; }
@test -x $(1)/bin/pip || $(PYTHON) -m venv $(1) || { rm -rf $(1); echo \
  "error: $(PYTHON) cannot make an environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
endef
