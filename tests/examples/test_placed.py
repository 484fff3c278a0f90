"""The placed examples, in small: losses by hand, three ways of running one update, and machines that are not here."""

import jax
import jax.numpy as jnp
import numpy as np
import placed_ensemble
import which_machine

import rlfx


def by_hand(weights, x):
    *hidden, (w, b) = [(np.asarray(w, np.float64), np.asarray(b, np.float64)) for w, b in weights]
    for v, c in hidden:
        x = np.maximum(x @ v + c, 0.0)
    return x @ w + b


def test_losses_of_critics_by_hand(lenient):
    state, batch = placed_ensemble.init(jax.random.key(1), 4, 8), placed_ensemble.transitions(jax.random.key(2), 5)
    key = jax.random.key(3)
    state = state._replace(targets=jax.tree.map(lambda w: 0.5 * w, state.targets))
    found, losses = jax.jit(placed_ensemble.update)(state, batch, key)
    next_key, subset_key, _ = jax.random.split(key, 3)
    mean, log_std = np.split(by_hand(state.actor, np.asarray(batch["next"])), 2, axis=-1)
    log_std = np.clip(log_std, -5, 2)
    noise = np.asarray(jax.random.normal(next_key, mean.shape))
    action = np.tanh(mean + np.exp(log_std) * noise)
    log_prob = (-0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi) - np.log(1 - action**2)).sum(axis=-1)
    chosen = np.asarray(jax.random.permutation(subset_key, 4))[:2]
    following = [by_hand(state.targets[i], np.concatenate([batch["next"], action], -1))[:, 0] for i in chosen]
    goal = np.asarray(batch["reward"]) + 0.99 * (np.minimum(*following) - 0.1 * log_prob)
    x = np.concatenate([batch["obs"], batch["action"]], -1)
    wanted = [np.mean((by_hand(critic, x)[:, 0] - goal) ** 2) for critic in state.critics]
    np.testing.assert_allclose(np.asarray(losses), wanted, rtol=2e-4)
    moved = jax.tree.map(lambda new, old, before: jnp.abs(new - (0.995 * before + 0.005 * old)).max(),
                         found.targets, found.critics, state.targets)  # fmt: skip
    assert max(map(float, jax.tree.leaves(moved))) < 1e-6


def test_an_ensemble_is_the_same_wherever_it_runs(lenient):
    losses = placed_ensemble.main(["--updates", "2", "--critics", "2", "--hidden", "8", "--batch", "8"])
    assert len(losses) == 3
    first, *others = (np.asarray(x) for x in losses.values())
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-4)


def test_machines_that_are_not_here(lenient):
    rows = which_machine.main(["--critics", "2", "--hidden", "256", "--batch", "512"])
    assert rows["one T4"][0] > rows["one A100"][0] > rows["one H100"][0]
    for kind, name, count in (("t4", "T4", 4), ("a100", "A100", 4)):
        one, several = rows[f"one {name}"], rows[f"four {name}"]
        assert several[0] <= one[0]
        assert 1 <= several[1] <= count
        rates = rlfx.target(kind).rates
        flops = 2 * 2 * 3 * 512 * (23 * 256 + 256 * 256)  # at least: two critics, forwards and backwards
        assert one[0] > flops / rates.flops
    assert all(cost > 0 for *_, cost in rows.values())
