"""AlphaZero on tic-tac-toe, against the same by hand: targets, losses, and games by loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import init_actor_critic

import rlfx

pytestmark = pytest.mark.usefixtures("lenient")
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def search():
    pytest.importorskip("mctx")
    import search

    return search


def params_of(scale=1.0):
    return jax.tree.map(lambda x: scale * x, init_actor_critic(jax.random.key(2), (18, 4, 9)))


def test_searching_finds_what_wins_and_what_does_not_lose(search, monkeypatch):
    """Of a policy that knows nothing: a win at once, and the place that the other would take to win."""
    monkeypatch.setattr(search, "SIMULATIONS", 64)
    find = jax.jit(lambda state: search.search(params_of(0.0), state, KEY))
    wins, blocks = [1, 1, 0, -1, -1, 0, 0, 0, 0], [1, 0, 0, -1, -1, 0, 0, 0, 1]
    for state, best in ((wins, 2), (blocks, 5)):
        move, weights = find(jnp.array(state))
        assert (int(move), int(weights.argmax())) == (best, best)
        np.testing.assert_array_equal(weights[np.array(state) != 0], 0.0)


def test_targets_of_both_sides_by_hand(search):
    """What the mover won, less what follows for the other; the critic's beyond the rollout, and before a move at random."""
    T, B, params = 12, 3, params_of()
    rollout = rlfx.unroll(search.act, length=T, batch=B)
    after, (samples, reward) = jax.jit(rollout)(params, search.empty(B), KEY)
    value = -np.asarray(jax.vmap(lambda s: search.critic(params, search.task.observe(s)))(after))
    states = np.asarray(samples.state)
    for t in reversed(range(T)):
        begins = (states[t + 1] == 0).all(-1) if t + 1 < T else (np.asarray(after) == 0).all(-1)
        value = np.asarray(reward[t]) + np.where(begins, 0.0, value)
        np.testing.assert_allclose(samples.target[t], value, rtol=1e-5)
        believed = np.asarray(jax.vmap(lambda s: search.critic(params, search.task.observe(s)))(states[t]))
        value = -np.where(samples.own[t], value, believed)
    assert 0 < samples.own.mean() < 1
    np.testing.assert_allclose(samples.weights.sum(-1), 1.0, rtol=1e-5)
    assert set(np.asarray(reward).ravel().tolist()) == {0.0, 1.0}


def test_the_loss_by_hand(search):
    params, state = params_of(), jnp.array([[1, 0, -1, 0, 0, 0, 0, 0, 0], [0] * 9])
    weights, target = np.full((2, 9), 1 / 9, np.float32) * (np.asarray(state) == 0), np.float32([0.5, -1.0])
    expected = []
    own = np.array([False, True])
    for s, w, played, wanted in zip(np.asarray(state), weights, own, target, strict=True):
        obs = np.concatenate([s == 1, s == -1]).astype(np.float32)
        free = s == 0
        raw = np.float64(search.mlp(params["actor"], obs))[free]
        log_probs = raw - np.log(np.exp(raw).sum())
        expected.append(-(w[free] * log_probs).sum() + played * (float(search.critic(params, obs)) - wanted) ** 2)
    got = search.loss(params, search.Sample(state, jnp.asarray(weights), own, target))
    np.testing.assert_allclose(got, np.mean(expected), rtol=1e-5)


def test_a_perfect_opponent_never_loses(search):
    """The table by itself: between two of them all games are drawn, and who moves anyhow loses some."""
    best, rng = search.perfect(), np.random.default_rng(0)

    def game(moves):
        state, turn = np.zeros(9, int), 0
        while True:
            state[moves[turn](state)] = 1
            if (state[search.LINES] == 1).all(-1).any():
                return turn
            if (state != 0).all():
                return None
            state, turn = -state, 1 - turn

    perfectly = lambda state: rng.choice(np.flatnonzero(best[search.number(state)]))  # noqa: E731
    anyhow = lambda state: rng.choice(np.flatnonzero(state == 0))  # noqa: E731
    assert {game((perfectly, perfectly)) for _ in range(20)} == {None}
    assert {game((anyhow, perfectly)) for _ in range(50)} == {1, None}
    assert {game((perfectly, anyhow)) for _ in range(50)} <= {0, None}


def test_games_are_counted_as_they_end(search):
    """A policy that always takes the first free place: each of its games, by loops over the same opponent's moves."""
    params = jax.tree.map(jnp.zeros_like, init_actor_critic(KEY, (18, 4, 9)))
    games = 20
    first = search.Game(search.empty(games), jnp.arange(games) % 2 == 0, jnp.zeros(games, bool))

    def seen(params, game, t):
        after, lost = search.play(params, game, t)
        return after, (game, after, lost)

    _, (before, after, lost) = rlfx.unroll(seen, length=9, batch=games)(params, first, KEY)
    for b in range(games):
        for t in range(9):
            state, moved = np.asarray(before.state[t, b]), -np.asarray(after.state[t, b])
            move = int(np.flatnonzero(state != moved)[0]) if (state != moved).any() else None
            mine, over = bool(before.mine[t, b]), bool(before.over[t, b])
            if mine and not over:
                assert move == np.flatnonzero(state == 0)[0]
            won = (moved[search.LINES] == 1).all(-1).any()
            assert bool(lost[t, b]) == (won and not mine and not over)
    assert 0 < int(lost.any(0).sum()) <= games
    recipe = search.make(updates=1, envs=2, length=2)
    trained = recipe.init(KEY)._replace(params=params)
    assert 0.0 <= float(recipe.evaluate(trained, KEY, 10)) < 1.0
