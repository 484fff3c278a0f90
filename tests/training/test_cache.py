"""Compiled programs in files: a second run reads what the first one compiled, and jax's settings stay the user's."""

import jax
import jax.numpy as jnp
import pytest

from rlfx.errors import TrainingError
from rlfx.training import Evaluate, run

KEY = jax.random.key(0)


def make():
    """An update that jax has not seen, with the same program, names and lines as the others."""

    def update(x, key):
        return x + jax.random.normal(key, x.shape), x.sum()

    return update


@pytest.fixture
def events():
    found = []
    listen = lambda name, **_: found.append(name.rpartition("/")[2])  # noqa: E731
    jax.monitoring.register_event_listener(listen)
    yield found
    jax.monitoring.unregister_event_listener(listen)


def test_a_second_run_compiles_nothing(tmp_path, events):
    def go(directory):
        evaluation = Evaluate(lambda agent, key: agent.mean(), every=2)
        events.clear()
        agent = run(make(), jnp.zeros(3), KEY, updates=4, per_call=2, callbacks=[evaluation], cache_dir=directory).agent
        return agent, events.count("cache_hits"), events.count("cache_misses")

    # All from one line: a program that is traced from another one has other names in profiles, and is another entry.
    directories = [tmp_path / name for name in ("programs", "programs", "other")]
    (first, hits, misses), (second, again, compiled), (_, _, elsewhere) = [go(directory) for directory in directories]
    assert hits == compiled == 0
    assert misses >= again == elsewhere >= 2  # another directory is another cache, within one process too
    assert (first == second).all()


def test_settings_are_the_users_afterwards_and_errors_are_said(tmp_path):
    names = ("jax_compilation_cache_dir", "jax_compilation_cache_include_metadata_in_key")
    before = [getattr(jax.config, name) for name in names]

    def fails(x, key):
        assert jax.config.jax_compilation_cache_include_metadata_in_key
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(fails, jnp.zeros(3), KEY, updates=1, cache_dir=tmp_path)
    assert [getattr(jax.config, name) for name in names] == before
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"cache_dir .*file/c can't be made: NotADirectoryError") as error:
        run(make(), jnp.zeros(3), KEY, updates=1, cache_dir=tmp_path / "file" / "c")
    assert "can be written" in str(error.value)
    with pytest.raises(TrainingError, match="cache_dir must be a path"):
        run(make(), jnp.zeros(3), KEY, updates=1, cache_dir=7)
