"""Frame stacking, attention over the past, and backpropagation through time, against hand-written arrays and scans."""

import attention
import frame_stacking
import gru_bptt
import hand
import jax
import jax.numpy as jnp
import memory_over_time
import numpy as np
import pytest
from networks import init_mlp, mlp

import rlfx.envs

T, B, KEY = 24, 3, jax.random.key(7)


@pytest.fixture
def env(monkeypatch):
    env = rlfx.envs.make("CartPole-v1", max_steps_in_episode=9, theta_threshold_radians=0.12)
    monkeypatch.setattr(frame_stacking, "env", env)
    monkeypatch.setattr(attention, "env", env)
    return env


def start(env):
    return jax.vmap(env.reset)(jax.random.split(jax.random.key(0), B))


def recorded(env, program):
    """The program, returning what it saw, the age of the episode, and whether it ends here."""

    def record(params, state, t):
        _, after, _ = program(params, state, t)
        return after, (env.observe(state), state.time, after.time == 0)

    return record


def played(env, program, params):
    run = jax.jit(rlfx.unroll(recorded(env, program), length=T, batch=B))
    _, (obs, age, done) = run(params, start(env), KEY)
    assert done[:-1].any()
    returns = hand.monte_carlo(np.ones((T, B)), done, 0.99)
    return jnp.stack([obs[..., 0], 10.0 * obs[..., 2]], -1), age, (returns - returns.mean()) / (returns.std() + 1e-6)


def log_probs_by_sampling(logits):
    """The actions that the program's keys draw from these logits, and their log-probabilities."""
    (keys,) = hand.keys(T, B, KEY, "action")
    log_probs = jax.nn.log_softmax(logits)
    action = hand.over(jax.random.categorical, keys, log_probs)
    return hand.chosen(log_probs, jax.lax.stop_gradient(action))


def gradients(env, module, params, logits):
    loss_fn = rlfx.compile(module.reinforce, length=T, batch=B)
    got = jax.jit(jax.grad(lambda p: loss_fn(p, start(env), KEY)[0]))(params)
    x, age, returns = played(env, module.reinforce, params)
    wanted = jax.jit(jax.grad(lambda p: jnp.mean(-log_probs_by_sampling(logits(p, x, age)) * returns)))(params)
    return got, wanted


def test_frame_stacking_is_a_hand_written_stack(env):
    params = init_mlp(jax.random.key(1), (2 * frame_stacking.FRAMES, 16, 2))

    def logits(params, x, age):
        frames = [
            jnp.where((age >= k)[..., None], jnp.concatenate([jnp.zeros_like(x[:k]), x[: T - k]]), 0.0)
            for k in reversed(range(frame_stacking.FRAMES))
        ]
        return hand.over(lambda f: mlp(params, f), jnp.concatenate(frames, -1))

    hand.assert_close(*gradients(env, frame_stacking, params, logits))


def test_attention_is_a_hand_written_causal_attention(env):
    params = attention.init_params(jax.random.key(1))

    def logits(params, x, age):
        heads, width = attention.HEADS, attention.WIDTH
        qkv = hand.over(lambda x: mlp(params["attention"], x), x).reshape(T, B, 3, heads, width)
        query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("tbhw,sbhw->tsbh", query, key) / width**0.5
        t = jnp.arange(T)
        distance = (t[:, None] - t[None, :])[:, :, None]  # [T, T, 1]
        scores = scores - (distance.astype(jnp.float32)[..., None] * jax.nn.softplus(params["slope"])[None, None, None])
        visible = (distance >= 0) & (distance <= age[:, None])  # not the future, and not an earlier episode
        weights = jax.nn.softmax(jnp.where(visible[..., None], scores, -jnp.inf), axis=1)
        found = jnp.einsum("tsbh,sbhw->tbhw", weights, value).reshape(T, B, heads * width)
        return hand.over(lambda f: mlp(params["head"], f), jnp.concatenate([x, found], -1))

    hand.assert_close(*gradients(env, attention, params, logits))


def scan_loss(params, symbols, block=None):
    x = jax.nn.one_hot(symbols, gru_bptt.SYMBOLS)

    def cell(h, x_and_t):
        x, t = x_and_t
        if block is not None:
            h = jnp.where(t % block == 0, jax.lax.stop_gradient(h), h)
        h = jax.vmap(lambda h, x: gru_bptt.gru(params["gru"], h, x))(h, x)
        return h, jax.nn.log_softmax(jax.vmap(lambda h: mlp(params["head"], h))(h))

    _, log_probs = jax.lax.scan(cell, jnp.zeros((B, gru_bptt.HIDDEN)), (x, jnp.arange(T)))
    recalled = hand.chosen(log_probs[gru_bptt.DELAY :], symbols[: T - gru_bptt.DELAY])
    return -recalled.sum() / (T * B)


@pytest.mark.parametrize(
    ("program", "block"),
    [(gru_bptt.recall_carry, None), (gru_bptt.recall_solve, None), (gru_bptt.truncated(8), 8)],
    ids=["carry", "solve", "truncated"],
)
def test_backpropagation_through_time_is_that_of_a_scan(program, block):
    params = gru_bptt.init_params(jax.random.key(1))
    symbols = jax.random.randint(jax.random.key(2), (T, B), 0, gru_bptt.SYMBOLS)
    h = None if program is gru_bptt.recall_solve else jnp.zeros((B, gru_bptt.HIDDEN))
    loss_fn = rlfx.compile(program, length=T, batch=B)
    got = jax.jit(jax.value_and_grad(lambda p: loss_fn((p, symbols), h)[0]))(params)
    hand.assert_close(got, jax.jit(jax.value_and_grad(scan_loss), static_argnums=2)(params, symbols, block))


def test_truncation_changes_the_gradient():
    params = gru_bptt.init_params(jax.random.key(1))
    symbols = jax.random.randint(jax.random.key(2), (T, B), 0, gru_bptt.SYMBOLS)
    whole, cut = (jax.grad(scan_loss)(params, symbols, block)["gru"]["u"] for block in (None, 8))
    assert jnp.abs(whole - cut).max() > 0.01 * jnp.abs(whole).max()


def test_the_scripts_run(capsys, lenient):
    for module in (frame_stacking, attention, gru_bptt):
        module.main(["--updates", "2"])
    out = capsys.readouterr().out
    assert out.count("falls per 1,000 steps") == 2
    assert "truncated to 4: loss" in out


def test_monte_carlo_offloads_or_acts_again_and_n_step_forgets(lenient):
    found = list(memory_over_time.main(["--size", "32", "--length", "64", "--batch", "4"]).values())
    assert [(e.plan.form, e.plan.offload is not None) for e in found] == [
        ("blocks", True),
        ("replay", False),
        ("stream", False),
    ]
    stacked = 4 * 3 * 32 * 32 * 64 * 4
    assert found[0].timeline.peak_host >= stacked > found[0].timeline.peak_device
    assert all(e.measured_bytes <= stacked // 2 for e in found[1:])
