# `make demo` and `make test` prepare what they need; the second run starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILER := $(VENV)/.compiler
PYTEST_ARGS ?=
JOBS ?= 2

export JAX_PLATFORMS ?= cpu

.PHONY: demo test lint format docs check-deep clean fuzz fuzz-inputs mutate bench faults soak tpu

$(STAMP): pyproject.toml
	@echo "== preparing $(VENV) (a few minutes the first time: jax is large)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "no venv module: apt-get install python3-venv"; exit 1; }
	@$(BIN)/python -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,router,otel]'
	@touch $(STAMP)

# The TPU compiler, for the tests named aot: 200 MB that the demo does not need.
$(COMPILER): $(STAMP)
	@echo "== preparing the TPU compiler (once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[tpu]'
	@touch $(COMPILER)

demo: $(STAMP)
	@$(BIN)/python -m pdjax.serve.demo

test: $(STAMP) $(COMPILER)
	@echo "== fetching the test model (once)"
	@$(BIN)/pdjax fetch smollm2
	@echo "== lint and types"
	@$(MAKE) --no-print-directory lint
	@echo "== tests, in parts, two at a time: each is printed when it has ended, the longest in twenty minutes or so"
	@$(BIN)/python tests/run_all.py $(PYTEST_ARGS)

lint: $(STAMP)
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check .; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary pdjax/core pdjax/sched pdjax/engine pdjax/sim pdjax/faults pdjax/campaign

format: $(STAMP)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# Every search, also the large ones: a quarter of an hour or so. Small ones are part of `make test`.
check-deep: $(STAMP)
	@$(BIN)/sim check --deep

docs: $(STAMP)
	@$(BIN)/sim docs --write

# Every figure beside its baseline, about ten minutes on two cores; docs/performance.md has the last ones.
bench: $(STAMP)
	@$(BIN)/python benchmarks/all.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Inputs of strangers at every parser: requests, raw bytes, frames, traces, model files. FUZZ_EXAMPLES of each.
fuzz-inputs: $(STAMP)
	@FUZZ_EXAMPLES=$${FUZZ_EXAMPLES:-1000} $(BIN)/python -m pytest --timeout 0 tests/inputs

fuzz: $(STAMP)
	@$(BIN)/sim fuzz --seeds 20000 --jobs $(JOBS) --coverage

mutate: $(STAMP)
	@$(BIN)/sim mutate --jobs $(JOBS) --write

# Faults on real processes, compared with the simulator and with what is promised; writes docs/faults.md. An hour or more.
faults: $(STAMP)
	@failed=0; for campaign in "files tests/traces" matrix aborts rounds neighbours; do \
		$(BIN)/python -m pdjax.campaign $$campaign --write || failed=1; done; exit $$failed

SOAK_S ?= 600
SOAK_SEED ?= 1

# A deployment at full load under random faults.
soak: $(STAMP)
	@$(BIN)/python -m pdjax.campaign soak --seconds $(SOAK_S) --seed $(SOAK_SEED) --write

# The hardware suite, where there is a TPU (docs/tpu.md). The process that starts it must not take the chips.
tpu: $(COMPILER)
	@JAX_PLATFORMS=cpu $(BIN)/python tests/tpu/tpu_run.py
