# `make up` installs what serving and the demo need; `make test` adds what tests, checks and benchmarks need, in the same
# .venv. Both installs are quick when neither pyproject.toml nor constraints.txt has changed.
# PIP_ARGS goes to every pip install (for instance another index), PYTEST_ARGS to pytest. Without an NVIDIA GPU torch is
# PyTorch's CPU build, from PyTorch's own index; where that can't be reached it is the one that pip finds, which may
# bring 4 GB of CUDA libraries. GPU=yes, or GPU=no, makes a new .venv for a host of the other kind; one that is there
# stays as it is.
# One process more than there are cores shares the tests, for some of their time is spent in waiting; 16 at most.
# tests/lanes.py has the order.
# What needs a core of its own comes behind them. (pytest's 5: PYTEST_ARGS chose none of these.)

PYTHON ?= $(shell for python in python3.11 python3.12 python3; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
	&& { echo $$python; break; }; done)
PIP_ARGS ?=
PYTEST_ARGS ?=
GPU ?= $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes || echo no)
BIN := .venv/bin
TEST_PROCESSES := $(shell n=$$(nproc); [ $$n -lt 16 ] && echo $$((n + 1)) || echo 16)
SHARED := -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
STAMP := .venv/.installed
DEV_STAMP := .venv/.installed-dev
PIP_INSTALL = $(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt
OLDEST_TRITON := 3.6.0
TORCH_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: install install-dev demo-model up test test-quick test-stall test-long lint bench chaos many wheel foreign-clients .engines/vllm test-vllm test-vllm-long kernels-matrix clean

install: $(STAMP)

install-dev: $(DEV_STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Garnish needs Python 3.11 or 3.12; name one with make PYTHON=/path/to/python" >&2; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(PIP_INSTALL) --upgrade pip
	@index=; if [ "$(GPU)" = yes ]; then echo "torch: the CUDA build"; \
	elif $(BIN)/python -c 'import urllib.request; urllib.request.urlopen("$(TORCH_INDEX)/torch/", timeout=5)' 2>/dev/null; \
	then echo "torch: the CPU build (no NVIDIA GPU found)"; index="--extra-index-url $(TORCH_INDEX)"; \
	else echo "torch: no NVIDIA GPU found, and $(TORCH_INDEX) can't be reached: the build that pip finds"; fi; \
	set -x; $(PIP_INSTALL) $$index torch==2.13.0
	$(PIP_INSTALL) -e '.[node,demo]'
	@touch $@

$(DEV_STAMP): $(STAMP)
	$(PIP_INSTALL) -e '.[node,demo,lightllm,dev]'
	@touch $@

demo-model: install
	@$(BIN)/python examples/models/convert_stories.py
	@$(BIN)/python examples/models/fetch_smollm2.py

up: install demo-model
	@exec $(BIN)/garnish up -f serverless.yml

test: install-dev demo-model
	$(BIN)/python -m pytest -m "not slow and not alone and not vllm" $(SHARED) $(PYTEST_ARGS) || [ $$? -eq 5 ]
	$(BIN)/python -m pytest -m "not slow and alone" $(PYTEST_ARGS) || [ $$? -eq 5 ]
	@[ -e .engines/vllm ] || echo "NOT RUN: the tests with vLLM, whose environment is missing; make test-vllm"

# Half of all tests, those that start no process and no server: in two minutes.
test-quick: install-dev
	$(BIN)/python -m pytest --quick -m "not slow and not alone and not vllm" -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Tests that measure time, all of whose processes are stopped for five seconds at three drawn times.
test-stall: install-dev demo-model
	$(BIN)/python -m tests.stall

test-long: install-dev demo-model
	GARNISH_TEST_DRAWS=many $(BIN)/python -m pytest -m "(slow or hypothesis) and not vllm" $(SHARED) --timeout 3600 $(PYTEST_ARGS)

# The environment in which nodes drive vLLM (3.4 GB, a minute or two); a link to one that is there will do.
.engines/vllm: install-dev
	@mkdir -p .engines
	@PIP_ARGS="$(PIP_ARGS)" $(BIN)/python -m tests.support.environments

# The real vLLM on the CPU as a node's engine: what takes five minutes. No other load on the host.
test-vllm: .engines/vllm
	$(BIN)/python -m pytest tests/vllm -m "vllm and not slow" $(PYTEST_ARGS)

test-vllm-long: .engines/vllm
	GARNISH_TEST_DRAWS=many $(BIN)/python -m pytest tests/vllm -m vllm --timeout 3600 $(PYTEST_ARGS)

lint: install-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.lint.pages
	$(BIN)/python -m tests.lint.words
	@echo "product: $$(git ls-files "adapters/*.py" "cluster/*.py" "garnish/*.py" "gateway/*.py" "infra/*.py" "kernels/*.py" "node_agent/*.py" | xargs cat | wc -l) lines"

bench: install-dev demo-model
	$(BIN)/python -m benchmarks.exactness.exactness --json benchmarks/results/exactness.json
	$(BIN)/python -m benchmarks.exactness.rounding --json benchmarks/results/rounding.json
	$(BIN)/python -m benchmarks.prefix_cache.prefix_cache --json benchmarks/results/prefix_cache.json
	$(BIN)/python -m benchmarks.engine.engine --json benchmarks/results/engine.json
	$(BIN)/python -m benchmarks.serve.serve --json benchmarks/results/serve.json
	$(BIN)/python -m benchmarks.adapter_memory.memory --json benchmarks/results/memory.json
	$(BIN)/python -m benchmarks.adapter_memory.eviction --json benchmarks/results/eviction.json
	$(BIN)/python -m benchmarks.adapter_memory.prefetch --json benchmarks/results/prefetch.json
	$(BIN)/python -m benchmarks.forecast.forecast --json benchmarks/results/forecast.json
	$(BIN)/python -m benchmarks.kernels.kernels --json benchmarks/results/kernels.json
	$(BIN)/python -m benchmarks.handoff.handoff --json benchmarks/results/handoff.json
	$(BIN)/python -m benchmarks.link_bytes.link_bytes --json benchmarks/results/link_bytes.json
	$(BIN)/python -m benchmarks.gpu.plan_replay --json benchmarks/results/plan_replay.json
	$(BIN)/python -m benchmarks.coldstart.default --json benchmarks/results/coldstart_default.json
	$(BIN)/python -m benchmarks.gateway.gateway --json benchmarks/results/gateway.json
	$(BIN)/python -m benchmarks.gateway.random_keys --json benchmarks/results/random_keys.json
	$(BIN)/python -m benchmarks.gateway.control_plane --json benchmarks/results/control_plane.json
	$(BIN)/python -m benchmarks.registry.scale --json benchmarks/results/scale.json
	$(BIN)/python -m benchmarks.scheduling.placement --json benchmarks/results/placement.json
	$(BIN)/python -m benchmarks.perfmodel.perfmodel --json benchmarks/results/perfmodel.json
	$(BIN)/python -m benchmarks.perfmodel.vllm_model --json benchmarks/results/perfmodel_vllm.json
	$(BIN)/python -m benchmarks.scheduling.scheduling --only sim60 --profiles papers --json benchmarks/results/scheduling.json
	$(BIN)/python -m benchmarks.scheduling.scheduling --only sim60 --profiles smollm2-cpu --json benchmarks/results/scheduling_measured.json
	$(BIN)/python -m benchmarks.scheduling.scheduling --only testbed8 --json benchmarks/results/testbed.json
	$(BIN)/python -m benchmarks.scheduling.fidelity --json benchmarks/results/fidelity.json
	$(BIN)/python -m benchmarks.fairness.fairness --json benchmarks/results/fairness.json
	$(BIN)/python -m benchmarks.autoscale.autoscale --json benchmarks/results/autoscale.json
	$(BIN)/python -m benchmarks.pages.tables
	$(BIN)/python -m benchmarks.pages.plots

# An hour and a half: one tenant takes all it gets of every shared pool; parts of a service are killed, a minute apart
# and in a storm; resources are taken away in the middle of calls of every route; docs/results/benchmarks.md.
chaos: install-dev demo-model
	GARNISH_POOL_MINUTES=30 $(BIN)/python -m pytest -q -n 0 --timeout 2400 tests/gateway/places/test_one_tenant_holds_all.py
	$(BIN)/python -m benchmarks.faults.chaos --minutes 10 --every 60 --json benchmarks/results/chaos_minute.json
	$(BIN)/python -m benchmarks.faults.chaos --minutes 20 --json benchmarks/results/chaos.json
	$(BIN)/python -m benchmarks.faults.gone --minutes 30 --json benchmarks/results/gone.json
	$(BIN)/python -m benchmarks.pages.tables

# Hours: 128 adapters, then 1,000, called as a trace calls functions; docs/results/benchmarks.md.
many: install-dev demo-model
	$(BIN)/python -m benchmarks.many.many --json benchmarks/results/many.json
	$(BIN)/python -m benchmarks.many.many --adapters 1000 --json benchmarks/results/many_1000.json
	$(BIN)/python -m benchmarks.batches.batches --json benchmarks/results/batches.json
	$(BIN)/python -m benchmarks.pages.tables

# vLLM's and guidellm's load generators, each in an environment of its own, against the service; docs/guide/clients.md.
foreign-clients: install-dev demo-model
	$(BIN)/python -m benchmarks.clients.foreign_clients --json benchmarks/results/foreign_clients.json

# GPU kernels compiled for sm_80, sm_90 and sm_100, which needs no GPU: by the installed Triton, by the oldest that is
# supported, and handoff.cu by NVRTC (.kernels-matrix: 800 MB).
kernels-matrix: install-dev
	$(BIN)/python -m benchmarks.kernels.resources
	$(BIN)/python -m pip install $(PIP_ARGS) --upgrade --no-deps --target .kernels-matrix triton==$(OLDEST_TRITON) \
		cuda-bindings cuda-pathfinder nvidia-cuda-nvrtc
	PYTHONPATH=.kernels-matrix $(BIN)/python -m benchmarks.kernels.resources
	LD_LIBRARY_PATH=$$(echo $(CURDIR)/.kernels-matrix/nvidia/*/lib) PYTHONPATH=.kernels-matrix \
		$(BIN)/python -m benchmarks.kernels.resources --nvrtc

# For instances that `garnish infra` starts: copy dist/*.whl to S3 and name it in infra.aws.package.
# setuptools would take files that no longer exist from a former build.
wheel: install
	rm -rf build dist
	$(BIN)/python -m pip wheel $(PIP_ARGS) --no-deps --wheel-dir dist .
	@rm -rf build; ls dist/*.whl

clean:
	rm -rf .venv models .garnish build dist .foreign-clients .kernels-matrix .engines
