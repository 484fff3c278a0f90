# Two commands, each doing all the set-up on a fresh machine with Python 3.11 and nothing installed:
#   make demo   trains PPO on CartPole from a short per-timestep program
#   make test   installs everything the tests need, and runs them
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= 2

.PHONY: demo test test-newest test-x64 slow all lint docs clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[demo]'
	touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

demo: $(VENV)/.demo
	$(BIN)/python examples/ppo_cartpole.py

# What looks at XLA's output runs as XLA compiles for users, all else without the passes that take long (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal
test: $(VENV)/.dev lint
	RLFX_TESTS=quick $(PYTEST) -m 'not slow and not aot'
	RLFX_TESTS=optimised $(PYTEST) -m 'not slow and not aot' tests

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[test]'
	touch $@

NEWEST := $(addprefix tests/recurrence/test_, language.py errors.py generated.py returns.py keys.py lift.py plans.py epochs.py own_cotangents.py custom_derivatives.py composition.py)

# Of the compiler's tests, those that meet most of jax, on whatever jax this Python gets: `make test-newest PYTHON=python3.13 VENV=.venv-newest`.
test-newest: $(VENV)/.test
	$(BIN)/python -c "import jax; print('newest lane: jax', jax.__version__)"
	RLFX_TESTS=quick $(PYTEST) -m 'not slow' $(NEWEST)

# What only 64-bit types show: the language, transforms and environments with jax's wide default.
test-x64: $(VENV)/.dev
	JAX_ENABLE_X64=1 RLFX_TESTS=quick $(PYTEST) -m 'not slow' $(X64_TESTS)

X64_TESTS := tests/test_x64.py $(addprefix tests/envs/test_, own.py wrappers.py prng.py) $(addprefix tests/transforms/test_, offload.py store.py)
X64_TESTS += $(addprefix tests/recurrence/test_, language.py returns.py discounted_sum.py precision.py mixed_precision.py lift.py shuffle.py)
X64_TESTS += $(addprefix tests/recurrence/test_, custom_derivatives.py own_cotangents.py until_gradients.py extremes.py empty_slices.py)

slow: $(VENV)/.dev
	$(PYTEST) -m slow

all: test slow

# Compiling for GPUs and TPUs that are not here: environments of their own (600 and 700 MB), with the jax of $(VENV).
AOT_PYTHON ?= $(PYTHON)
aot-cuda aot-tpu: aot-%: $(VENV)/.dev
	$(BIN)/python -m rlfx.ahead $* --to .venv-aot-$* --python $(AOT_PYTHON)

test-aot: aot-cuda aot-tpu
	$(BIN)/python -m pytest -q -m aot tests/ahead

# Every example's update, every form of plan and every kernel, compiled for TARGETS. Nothing runs.
TARGETS ?= h200 a100 t4 v5e
targets: aot-cuda aot-tpu
	$(BIN)/python benchmarks/examples_ahead.py --targets $(TARGETS)

.PHONY: aot-cuda aot-tpu test-aot targets

lint: $(VENV)/.dev
	$(BIN)/ruff check rlfx tests examples benchmarks
	$(BIN)/lint-imports --config pyproject.toml
	$(BIN)/pyright --level error --pythonpath $(BIN)/python

# Wheel and sdist, installed into empty environments with each extra alone.
package: $(VENV)/.package
	bash .ci/package $(BIN)/python

$(VENV)/.package: | $(BIN)/python
	$(BIN)/python -m pip install --quiet build
	touch $@

.PHONY: package
docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV)
