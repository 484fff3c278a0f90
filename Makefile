# Two commands, each doing all the set-up on a fresh machine with Python 3.11 and nothing installed:
#   make demo   trains PPO on CartPole from a short per-timestep program
#   make test   installs everything the tests need, and runs them
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= 2

.PHONY: demo test test-newest slow lint docs clean

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

test: $(VENV)/.dev lint
	$(BIN)/python -m pytest -q -n $(JOBS) -m 'not slow'

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[test]'
	touch $@

# The compiler's tests on whatever jax this Python gets: `make test-newest PYTHON=python3.13 VENV=.venv-newest`.
test-newest: $(VENV)/.test
	$(BIN)/python -c "import jax; print('newest lane: jax', jax.__version__)"
	$(BIN)/python -m pytest -q -n $(JOBS) -m 'not slow' tests/recurrence -k 'not a_thousand_programs and not access_table'

slow: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n $(JOBS) -m slow

lint: $(VENV)/.dev
	$(BIN)/ruff check rlfx tests examples benchmarks
	$(BIN)/lint-imports --config pyproject.toml
	$(BIN)/pyright --level error --pythonpath $(BIN)/python

docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV)
