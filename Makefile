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

NEWEST := $(addprefix tests/recurrence/test_, language.py errors.py generated.py returns.py keys.py lift.py plans.py epochs.py own.py own_cotangents.py custom_derivatives.py composition.py)
NEWEST += $(addprefix tests/transforms/test_fuse_, steps.py defined.py)

# Of generated programs `make test` runs all of the sample; the lanes of other versions and widths leave these out of it. Names are
# the beginnings of those of tests.
SAMPLED := $(addprefix recurrence/test_generated.py::test_a_hundred_programs[, 1 2 3)
SAMPLED += $(addprefix recurrence/test_plans.py::test_generated_programs_have_the_same_results_under_every_legal_plan[, 1 2 3 4 5)

# Of the compiler's tests, and the kernels', those that meet most of jax, on whatever jax this Python gets: `make test-newest PYTHON=python3.13 VENV=.venv-newest`.
test-newest: $(VENV)/.test
	$(BIN)/python -c "import jax; print('newest lane: jax', jax.__version__)"
	RLFX_TESTS=quick $(PYTEST) -m 'not slow' $(NEWEST) $(addprefix --deselect=tests/,$(SAMPLED))

# The same and what meets the other packages, with every direct dependency at the lower bound of pyproject.toml.
OLDEST := $(NEWEST) tests/training tests/envs/test_gymnax.py tests/envs/test_wrappers.py tests/place/test_replay.py
test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet uv
	.venv-oldest/bin/python -m uv pip install --quiet --python .venv-oldest/bin/python --resolution lowest-direct -e '.[test]'
	RLFX_TESTS=quick .venv-oldest/bin/python -m pytest -q -n $(JOBS) --dist worksteal -m 'not slow and not aot' $(OLDEST)

.PHONY: test-oldest

# What only 64-bit types show: the language, transforms and environments with jax's wide default.
test-x64: $(VENV)/.dev
	JAX_ENABLE_X64=1 RLFX_TESTS=quick $(PYTEST) -m 'not slow' $(X64_TESTS) $(addprefix --deselect=tests/,$(X64_LEFT_OUT))

X64_TESTS := tests/test_x64.py $(addprefix tests/envs/test_, own.py wrappers.py prng.py)
X64_TESTS += $(addprefix tests/transforms/test_, offload.py store.py incrementalize.py fuse_programs.py fuse_steps_tpu.py)
X64_TESTS += $(addprefix tests/recurrence/test_, language.py returns.py discounted_sum.py precision.py mixed_precision.py lift.py shuffle.py)
X64_TESTS += $(addprefix tests/recurrence/test_, custom_derivatives.py own.py own_cotangents.py until_gradients.py extremes.py empty_slices.py)
X64_TESTS += $(addprefix tests/recurrence/test_, indices.py slices.py inside_loops.py plans.py generated.py)
# What would cost most there: more of the same programs, and what no width changes.
X64_LEFT_OUT := $(SAMPLED) $(addprefix transforms/test_fuse_programs.py::test_ppo_has_the_same_values_and_gradients[, 1 7)
X64_LEFT_OUT += recurrence/test_slices.py::test_nothing_of_a_slice_leaks_from_its_trace

slow: $(VENV)/.dev
	$(PYTEST) -m slow

all: test slow

# Compiling for GPUs and TPUs that are not here: environments of their own (600 and 700 MB), with the jax of $(VENV).
AOT_PYTHON ?= $(PYTHON)
aot-cuda aot-tpu: aot-%: $(VENV)/.dev
	$(BIN)/python -m rlfx.ahead $* --to .venv-aot-$* --python $(AOT_PYTHON)

test-aot: aot-cuda aot-tpu
	$(BIN)/python -m pytest -q -m aot tests/ahead

# A sample for H200, A100 and T4, without libtpu: the tests for TPUs are skipped.
test-aot-cuda: aot-cuda
	$(PYTEST) -m 'aot and not slow' tests/ahead/test_plugins.py tests/ahead/test_examples_ahead.py

# Every example's update, every form of plan and every kernel, compiled for TARGETS. Nothing runs.
TARGETS ?= h200 a100 t4 v5e
targets: aot-cuda aot-tpu
	$(BIN)/python benchmarks/examples_ahead.py --targets $(TARGETS) $(if $(JSON),--json $(JSON))

.PHONY: aot-cuda aot-tpu test-aot test-aot-cuda targets

# What only an accelerator can show, on a machine that has one, with the Python and jax that are there; results under benchmarks/results/gpu.
GPU_PYTHON ?= $(PYTHON)
gpu:
	$(GPU_PYTHON) -m benchmarks.gpu

.PHONY: gpu

lint: $(VENV)/.dev
	$(BIN)/ruff check rlfx tests examples benchmarks docs
	$(BIN)/lint-imports --config pyproject.toml
	$(BIN)/pyright --level error --pythonpath $(BIN)/python

# Wheel and sdist, installed into empty environments with each extra alone.
package: $(VENV)/.package
	bash .ci/package $(BIN)/python

$(VENV)/.package: | $(BIN)/python
	$(BIN)/python -m pip install --quiet build
	touch $@

.PHONY: package

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	touch $@

# The site under docs/_build/html: the notebooks that have changed are executed; every warning is an error. Then the pages' doctests.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going -n -b html docs docs/_build/html
	$(BIN)/python -m pytest -q --doctest-glob='*.md' docs/*.md docs/notebooks.py

# Links that leave the site; this needs the network.
docs-links: $(VENV)/.docs
	RLFX_DOCS_EXECUTE=off $(BIN)/python -m sphinx -b linkcheck docs docs/_build/links

# examples/notebooks/*.ipynb, from the pages that they are made of.
notebooks:
	$(BIN)/python -m docs.notebooks

.PHONY: docs-links notebooks

# The quickstart on a simulated Colab (its packages; jax of its image, and ours), first cell to trained agent in three minutes. This needs the network.
COLAB_PYTHON ?= python3.12
colab: $(BIN)/python
	$(BIN)/python -m docs.colab --python $(COLAB_PYTHON)

.PHONY: colab

clean:
	rm -rf $(VENV)
