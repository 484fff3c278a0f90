"""The programs by hand of `benchmarks/launches.py` compute what rlfx's do: values and gradients, on a CPU, in small."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx

KEY = jax.random.key(3)


@pytest.fixture
def launches(script):
    return script("launches")


def close(found, wanted, **tolerance):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), found, wanted)


def filled(shapes, key):
    """Numbers of these shapes; a tenth of booleans are true."""
    leaves, treedef = jax.tree.flatten(shapes)
    keys = jax.random.split(key, len(leaves))
    made = [
        jax.random.bernoulli(k, 0.1, x.shape) if x.dtype == bool
        else jax.random.randint(k, x.shape, 0, 2) if x.dtype == jnp.int32
        else jax.random.normal(k, x.shape)
        for k, x in zip(keys, leaves, strict=True)
    ]  # fmt: skip
    return jax.tree.unflatten(treedef, made)


@pytest.mark.parametrize("name", ["discounted sums", "GAE", "V-trace"])
def test_sums_over_time(launches, name):
    both = launches.sums(name, 20, 3)
    arguments = filled(both["rlfx"][1], KEY)
    here, there = (jax.jit(fn)(*arguments) for fn, _ in both.values())
    close(here, there, rtol=2e-5, atol=1e-6)
    assert all(float(jnp.abs(g).max()) > 1e-3 for g in here[1])


def test_the_recurrent_learner(launches):
    length, batch, hidden = 9, 4, 8
    p = launches.targets.recurrent_ppo
    params = p.init_params(KEY, hidden)
    samples = filled(launches.targets.sequences(length, batch), KEY)
    h = jax.random.normal(KEY, (batch, hidden))
    loss_fn = rlfx.compile(p.learn, length=length, batch=batch)
    found = jax.jit(jax.value_and_grad(lambda params: loss_fn((params, samples), h)[0]))(params)
    wanted = jax.jit(jax.value_and_grad(launches.by_hand.recurrent_loss))(params, samples, h)
    close(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_whole_update(launches):
    """With rlfx's keys and its permutation: the same samples, the same minibatches."""
    envs, p = 8, launches.ppo_cartpole
    optimizer = p.make_optimizer(100)
    agent = p.init_agent(KEY, optimizer, envs)

    def keys(key, name, length, batch):
        return jax.vmap(lambda t: launches.ppo_timerl.keys_of(key, name, jnp.arange(batch), t))(jnp.arange(length))

    rollout = rlfx.unroll(p.act, length=p.LENGTH, batch=envs)
    found = jax.jit(p.make_update(rollout, optimizer))(agent, KEY)
    wanted = jax.jit(launches.by_hand.ppo_update(optimizer, envs, keys=keys, shuffle=rlfx.shuffle))(agent, KEY)
    close(found[1], wanted[1], rtol=1e-6)
    assert bool(found[1][1].any()), "episodes ended"
    close(found[0][0], wanted[0][0], rtol=1e-3, atol=1e-4)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), found[0][0], agent[0])
    assert max(jax.tree.leaves(moved)) > 1e-3


def test_the_table_says_what_is_not_known(launches):
    row = {"program": "p", "target": "h200", "launches_at_least": 1234, "launches": None, "conditionals": 2}
    known = {**row, "form": "by hand", "launches": 1234, "conditionals": 0}
    text = launches.table([{**row, "form": "rlfx"}, known])
    assert text.splitlines()[-1] == "| p | 1,234 + (2 cond.) | 1,234 |"
