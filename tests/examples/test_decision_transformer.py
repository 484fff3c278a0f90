"""The decision transformer by hand: attention as loops over the last timesteps, its loss, how it acts, what it learns from."""

from functools import partial

import decision_transformer as dt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_losses_by_hand import assert_gradient, double, gradient, layers, numbers

import rlfx

pytestmark = pytest.mark.usefixtures("lenient")
KEY = jax.random.key(0)
T, B, CONTEXT = 7, 2, 3


@pytest.fixture
def params(monkeypatch):
    """Small, and random everywhere."""
    monkeypatch.setattr(dt, "CONTEXT", CONTEXT)
    return numbers(jax.eval_shape(lambda: dt.init_params(KEY, 4)), 1)


def normed(x):
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5)


def actions(params, to_go, obs, before):
    """The actions of an episode, ``[T, ACTIONS]``."""
    xs = [layers(params["embed"], np.concatenate([[to_go[t] / dt.RETURN, t / T], obs[t], before[t]])) for t in range(T)]
    for layer in params["layers"]:
        seen = [layers(layer["qkv"], normed(x)).reshape(3, dt.HEADS, -1) for x in xs]
        for t in range(T):
            query, found = seen[t][0], []
            for head in range(dt.HEADS):
                past = range(max(0, t - CONTEXT + 1), t + 1)
                scores = [
                    seen[s][1][head] @ query[head] / np.sqrt(query.shape[1]) + layer["age"][t - s, head] for s in past
                ]
                weights = np.exp(scores) / np.exp(scores).sum()
                found.append(sum(w * seen[s][2][head] for w, s in zip(weights, past, strict=True)))
            x = xs[t] + layers(layer["out"], np.concatenate(found))
            xs[t] = x + layers(layer["mlp"], normed(x))
    return np.stack([np.tanh(layers(params["act"], normed(x))) for x in xs])


@pytest.mark.parametrize("told", [True, False])
def test_it_learns_from_logged_episodes(params, told):
    rng = np.random.default_rng(2)
    obs, action = rng.normal(size=(T, B, dt.OBS)), rng.uniform(-1, 1, (T, B, dt.ACTIONS))
    reward = -10.0 * rng.random((T, B))
    ends, scaled = np.zeros((T, B), bool), dt.sac.PENDULUM.scale * reward
    log = dt.sac.Transition(*map(np.float32, (obs, action, scaled)), ends, np.float32(obs))
    before = np.concatenate([np.zeros((1, B, dt.ACTIONS)), action[:-1]])
    to_go = np.cumsum(reward[::-1], 0)[::-1] * told

    def by_hand(params):
        chosen = np.stack([actions(params, to_go[:, b], obs[:, b], before[:, b]) for b in range(B)], 1)
        return ((chosen - action) ** 2).sum(-1).mean()

    program = rlfx.compile(partial(dt.learn, told), length=T, batch=B)
    loss = lambda params: program((params, log), np.zeros((B, dt.ACTIONS), np.float32))[0]  # noqa: E731
    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(value, by_hand(double(params)), rtol=1e-4)
    expected = gradient(by_hand, params)
    if told:
        assert_gradient(grads, expected)
        return
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=2e-3, atol=1e-5), grads, expected)
    np.testing.assert_array_equal(grads["embed"][0][0][0], 0.0)  # what reads the return


def test_it_acts_as_it_learns(params):
    """The same actions as of a logged episode; what was received is no longer asked for."""

    def watched(params, carry, t):
        after, reward = dt.act(params, carry, t)
        return after, (carry.to_go, dt.env.observe(carry.state), carry.before, after.before, reward)

    states = jax.vmap(dt.env.reset)(jax.random.split(KEY, B))
    begin = dt.Carry(states, jnp.array([-30.0, dt.ASKED]), jnp.zeros((B, dt.ACTIONS)))
    _, seen = jax.jit(rlfx.unroll(watched, length=T, batch=B))(params, begin, KEY)
    to_go, obs, before, action, reward = double(seen)
    assert (reward < -0.01).all()
    np.testing.assert_allclose(to_go[0], [-30.0, dt.ASKED])
    np.testing.assert_allclose(to_go[1:], np.minimum(to_go[:-1] - reward[:-1], dt.ASKED), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(before, np.concatenate([np.zeros((1, B, dt.ACTIONS)), action[:-1]]))
    for b in range(B):
        np.testing.assert_allclose(
            action[:, b], actions(double(params), to_go[:, b], obs[:, b], before[:, b]), rtol=1e-4, atol=1e-5
        )


def test_the_log_in_episodes_and_the_best_of_them():
    """Of each environment one episode after the other; the best by their rewards."""
    episodes, length = 3, 4
    log = dt.sac.Transition(
        *(np.float32(np.random.default_rng(i).normal(size=(episodes * length, B))) for i in range(5))
    )
    ours = [(log.obs[e * length : (e + 1) * length, b], log.reward[e * length : (e + 1) * length, b].sum())
            for e in range(episodes) for b in range(B)]  # fmt: skip
    ours.sort(key=lambda pair: -pair[1])
    for share, count in ((1.0, 6), (0.5, 3), (0.01, 1)):
        cut = dt.in_episodes(log, length, share)
        np.testing.assert_array_equal(cut.obs, np.stack([obs for obs, _ in ours[:count]], 1))


def test_episodes_are_split_over_a_mesh():
    """The loss and its gradients (Adam's first moments), to the precision of sums."""
    sizes = {
        "sac_updates": 2,
        "length": 4,
        "envs": 2,
        "updates": 4,
        "hidden": (4,),
        "width": 4,
        "episode": 4,
        "episodes": 4,
    }
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("b",))
    agent = jax.jit(dt.make(**sizes).init)(KEY)
    one, split = (jax.jit(dt.make(**sizes, mesh=m).update)(agent, KEY) for m in (None, mesh))
    learned = lambda agent, metrics: (metrics["loss"], optax.tree_utils.tree_get(agent.opt_state, "mu"))  # noqa: E731
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), learned(*one), learned(*split))
