# Every command rests on `install`, which is quick when neither pyproject.toml nor constraints.txt has changed.
# PIP_ARGS goes to every pip install (for instance another index for torch), PYTEST_ARGS to pytest.
# Tests of a file stay together, in one of two processes: much of their time is spent in waiting.

PYTHON ?= $(shell for python in python3.11 python3.12 python3; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
	&& { echo $$python; break; }; done)
PIP_ARGS ?=
PYTEST_ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install demo-model up test test-long lint bench clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Garnish needs Python 3.11 or 3.12; name one with make PYTHON=/path/to/python" >&2; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt --upgrade pip torch==2.13.0
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[node,lightllm,dev]'
	@touch $@

demo-model: install
	@$(BIN)/python examples/models/convert_stories.py
	@$(BIN)/python examples/models/fetch_smollm2.py

up: install demo-model
	@exec $(BIN)/garnish up -f serverless.yml

test: install demo-model
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile $(PYTEST_ARGS)

test-long: install demo-model
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install demo-model
	$(BIN)/python -m benchmarks.exactness --json benchmarks/results/exactness.json
	$(BIN)/python -m benchmarks.engine --json benchmarks/results/engine.json
	$(BIN)/python -m benchmarks.serve --json benchmarks/results/serve.json
	$(BIN)/python -m benchmarks.memory --json benchmarks/results/memory.json
	$(BIN)/python -m benchmarks.kernels --json benchmarks/results/kernels.json
	$(BIN)/python -m benchmarks.handoff --json benchmarks/results/handoff.json
	$(BIN)/python -m benchmarks.coldstart --json benchmarks/results/coldstart.json
	$(BIN)/python -m benchmarks.gateway --json benchmarks/results/gateway.json
	$(BIN)/python -m benchmarks.scale --json benchmarks/results/scale.json
	$(BIN)/python -m benchmarks.placement --json benchmarks/results/placement.json
	$(BIN)/python -m benchmarks.perfmodel --json benchmarks/results/perfmodel.json
	$(BIN)/python -m benchmarks.scheduling --only sim60 --profiles papers --json benchmarks/results/scheduling.json
	$(BIN)/python -m benchmarks.scheduling --only sim60 --profiles smollm2-cpu --json benchmarks/results/scheduling_measured.json
	$(BIN)/python -m benchmarks.scheduling --only testbed8 --json benchmarks/results/testbed.json
	$(BIN)/python -m benchmarks.fidelity --json benchmarks/results/fidelity.json
	$(BIN)/python -m benchmarks.fairness --json benchmarks/results/fairness.json
	$(BIN)/python -m benchmarks.autoscale --json benchmarks/results/autoscale.json
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.plots

clean:
	rm -rf .venv models .garnish
