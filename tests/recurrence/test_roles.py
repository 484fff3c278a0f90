"""Which operations of an outer program could run at once: PPO, the actor one iteration behind, DQN both ways."""

import jax
import jax.numpy as jnp
import pytest

import rlfx
from rlfx.recurrence.analysis.roles import roles

T, B, N, KEY = 4, 3, 32, jax.random.key(0)


def act(w, x, t):
    x = jnp.tanh(w @ x)
    return x, x


def explain(f, carry):
    return rlfx.unroll(f, length=6, dim="i").explain(None, carry, KEY)


rollout = rlfx.unroll(act, length=T, batch=B)
first = (jnp.eye(N), jnp.ones((B, N)))


def learn(w, samples):
    """Four steps with products as large as those of acting."""

    def step(w, _):
        return w - 0.1 * jax.grad(lambda w: jnp.mean((samples @ w) ** 2))(w), None

    with jax.named_scope("learn"):
        return jax.lax.scan(step, w, None, length=4)[0]


def ppo(lag):
    def iteration(_, agent, i):
        w, x = agent
        policy = rlfx.series(w, start=w)
        x, samples = rollout(policy[i - lag], x, i.key)
        return (learn(w, samples), x), rlfx.Last(jnp.mean(samples))

    return iteration


def test_with_its_own_parameters_ppo_is_one_role():
    found = explain(ppo(0), first)
    assert found.roles.shares == (1.0,)
    assert "one role, by the circle " in str(found)
    line = next(line for line in str(found).splitlines() if "one role" in line)
    assert "call[act]" in line
    assert "scan (learn)" in line
    assert "x[i - 1]" in line
    assert line.endswith("; it is one i long, and two roles need two, as with policy[i - 1]")


@pytest.mark.parametrize("lag", [1, 3])
def test_one_iteration_behind_they_are_two(lag):
    found = explain(ppo(lag), first)
    learner, actor = found.roles.parts
    assert [e.calls[0].program.name for e in actor if e.calls] == ["act"]
    assert all(not e.calls for e in learner)
    # T * B products with w while acting; as many forward, and as many back, in each of four steps.
    assert found.roles.shares[1] == pytest.approx(1 / 9, abs=0.05)
    assert "two roles could run at once: 8" in str(found)


def test_a_run_that_may_end_is_one_role():
    """What acts ahead would have acted for an iteration that is not there."""
    found = rlfx.unroll(ppo(1), length=6, dim="i", until=lambda c: c[1].mean() > 2.0).explain(None, first, KEY)
    assert found.roles.shares == (1.0,)
    assert " one role: with until= what acts ahead has already acted for a i that is not there" in str(found)


def dqn(earlier):
    def iteration(_, c, i):
        w, x, memory = c
        x, samples = rollout(w, x, i.key)
        seen = samples if not earlier else memory
        return (learn(w, seen), x, samples), None

    return iteration


@pytest.mark.parametrize("earlier", [False, True])
def test_dqn_is_two_roles_if_it_samples_what_earlier_iterations_saw(earlier):
    found = explain(dqn(earlier), (*first, jnp.zeros((T, B, N)))).roles
    assert len(found.parts) == (2 if earlier else 1)


def test_a_program_that_calls_none_has_no_roles():
    assert explain(lambda _, c, i: (c + 1.0, c), jnp.zeros(3)).roles is None


def test_what_reads_the_future_does_not_run_iteration_by_iteration():
    def whole(_, x, i):
        x, samples = rollout(jnp.eye(N), x, i.key)
        later = rlfx.series(samples.mean(), end=0.0)
        return x, later[i + 1] * samples

    assert explain(whole, first[1]).roles is None
    program = rlfx.trace(whole, None, first[1], KEY, length=6, dim="i", loss=False)
    assert roles(program) is None
