"""The returns library against brute force: at terminations, truncations, and at the end of the rollout."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx

T, GAMMA, LAM = 9, 0.9, 0.7


class Step(NamedTuple):
    """What the returns need of an environment's Step."""

    reward: Any
    terminated: Any
    truncated: Any
    final_obs: Any


class Data(NamedTuple):
    """A rollout of one or several environments; ``obs`` has one more timestep."""

    reward: Any
    terminated: Any
    truncated: Any
    obs: Any
    final_obs: Any
    w: Any
    log_rho: Any


#: which timesteps end by termination, by truncation, by both
ENDS = {
    "no end": ((), ()),
    "terminated": ((3,), ()),
    "truncated": ((), (3,)),
    "both at once": ((3,), (3,)),
    "several": ((1, 6), (4, 5)),
    "at the end of the rollout": ((), (T - 1,)),
    "terminated at the last step": ((T - 1,), ()),
    "everywhere": ((0, 2, 4, 6, 8), (1, 3, 5, 7)),
}
cases = pytest.mark.parametrize("ends", ENDS.values(), ids=list(ENDS))


def rollout(ends: tuple, seed: int = 0) -> Data:
    rng = np.random.default_rng(seed)
    flags = [np.isin(np.arange(T), e) for e in ends]
    f32 = lambda x: np.asarray(x, np.float32)  # noqa: E731
    return Data(
        f32(rng.normal(size=T)),
        *flags,
        f32(rng.normal(size=(T + 1, 2))),
        f32(rng.normal(size=(T, 2))),
        f32(rng.normal(size=2)),
        f32(rng.normal(size=T) * 0.7),
    )


def critic(w: Any, obs: Any) -> Any:
    return jnp.tanh(obs @ w)


def run(what, data: Data):
    """``what(step, value, next_value, log_rho)`` at every timestep; observations come from the carry, as in acting."""

    def f(p, obs, t):
        d = {k: rlfx.inputs(getattr(p, k))[t] for k in ("reward", "terminated", "truncated", "final_obs", "log_rho")}
        step = Step(d["reward"], d["terminated"], d["truncated"], d["final_obs"])
        value = critic(p.w, obs)
        following = rlfx.next_value(lambda o: critic(p.w, o), step, value)
        return rlfx.inputs(p.obs[1:])[t], what(step, value, following, d["log_rho"])

    return rlfx.unroll(f, length=T)(jax.tree.map(jnp.asarray, data), jnp.asarray(data.obs[0]))[1]


def numbers(d: Data):
    """``(value, next_value, terminated, done)`` as float64; next_value before masking."""
    value = np.tanh(d.obs[:-1].astype(float) @ d.w)
    following = np.tanh(d.obs[1:].astype(float) @ d.w)
    cut = d.truncated & ~d.terminated
    following = np.where(cut, np.tanh(d.final_obs.astype(float) @ d.w), following)
    return value, following, d.terminated, d.terminated | d.truncated


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


@cases
def test_next_value(ends):
    d = rollout(ends)
    close(run(lambda step, v, nv, r: nv, d), numbers(d)[1])


def by_hand_n_step(d: Data, n: int):
    _, nv, terminated, done = numbers(d)
    out = []
    for t in range(T):
        g, weight = 0.0, 1.0
        for k in range(t, min(t + n, T)):
            g += weight * d.reward[k]
            weight *= GAMMA
            last = k == min(t + n, T) - 1
            if done[k] or last:
                g += weight * (0.0 if terminated[k] else nv[k])
                break
        out.append(g)
    return np.array(out)


@cases
@pytest.mark.parametrize("n", [1, 2, 3, T, 50])
def test_n_step_return(ends, n):
    d = rollout(ends)
    close(run(lambda step, v, nv, r: rlfx.n_step_return(step, nv, gamma=GAMMA, n=n), d), by_hand_n_step(d, n))


@cases
@pytest.mark.parametrize("lam", [0.0, LAM, 1.0])
def test_lambda_return(ends, lam):
    """The exponentially weighted mean of n-step returns, each cut at the end of the episode."""
    d = rollout(ends)
    got = run(lambda step, v, nv, r: rlfx.lambda_return(step, nv, gamma=GAMMA, lam=lam), d)
    done = numbers(d)[3]
    by_n = {n: by_hand_n_step(d, n) for n in range(1, T + 1)}
    expected = []
    for t in range(T):
        end = next((k for k in range(t, T) if done[k]), T - 1)
        longest = end - t + 1
        g = sum((1 - lam) * lam ** (n - 1) * by_n[n][t] for n in range(1, longest))
        expected.append(g + lam ** (longest - 1) * by_n[longest][t])
    close(got, expected)


@cases
@pytest.mark.parametrize("lam", [0.0, LAM, 1.0])
def test_gae(ends, lam):
    d = rollout(ends)
    got = run(lambda step, v, nv, r: rlfx.gae(step, v, nv, gamma=GAMMA, lam=lam), d)
    v, nv, terminated, done = numbers(d)
    delta = d.reward + GAMMA * ~terminated * nv - v
    expected = []
    for t in range(T):
        total, weight = 0.0, 1.0
        for k in range(t, T):
            total += weight * delta[k]
            weight *= GAMMA * lam
            if done[k]:
                break
        expected.append(total)
    close(got, expected)


@cases
def test_gae_plus_value_is_the_lambda_return(ends):
    d = rollout(ends)
    both = run(
        lambda step, v, nv, r: (
            rlfx.gae(step, v, nv, gamma=GAMMA, lam=LAM) + v,
            rlfx.lambda_return(step, nv, gamma=GAMMA, lam=LAM),
        ),
        d,
    )
    close(*both)


@cases
@pytest.mark.parametrize(("lam", "clip_rho", "clip_c"), [(1.0, 1.0, 1.0), (0.8, 1.5, 0.9)])
def test_vtrace(ends, lam, clip_rho, clip_c):
    """Espeholt et al. 2018, eq. 1, as the sum over the rest of the episode."""
    d = rollout(ends)
    got = run(lambda s, v, nv, r: rlfx.vtrace(s, v, nv, r, gamma=GAMMA, lam=lam, clip_rho=clip_rho, clip_c=clip_c), d)
    v, nv, terminated, done = numbers(d)
    rho = np.minimum(np.exp(d.log_rho.astype(float)), clip_rho)
    c = lam * np.minimum(np.exp(d.log_rho.astype(float)), clip_c)
    delta = rho * (d.reward + GAMMA * ~terminated * nv - v)
    target = []
    for t in range(T):
        total, weight = v[t], 1.0
        for k in range(t, T):
            total += weight * delta[k]
            weight *= GAMMA * c[k]
            if done[k]:
                break
        target.append(total)
    following = [nv[t] * ~terminated[t] if done[t] or t == T - 1 else target[t + 1] for t in range(T)]
    close(got[0], target)
    close(got[1], rho * (d.reward + GAMMA * np.array(following) - v))


def test_vtrace_on_policy_is_the_lambda_return():
    d = rollout(ENDS["several"])
    target, expected = run(
        lambda s, v, nv, r: (
            rlfx.vtrace(s, v, nv, jnp.float32(0.0), gamma=GAMMA, lam=LAM)[0],
            rlfx.lambda_return(s, nv, gamma=GAMMA, lam=LAM),
        ),
        d,
    )
    close(target, expected)


def forward(d: Data, goes_on):
    """A return as the sum from t on, as long as ``goes_on[k]`` (weights of k), the next value from there; float64."""
    _, nv, terminated, done = numbers(d)
    out = []
    for t in range(T):
        g, weight = 0.0, 1.0
        for k in range(t, T):
            left = 0.0 if done[k] or k == T - 1 else goes_on[k + 1]
            g += weight * (d.reward[k] + GAMMA * (1 - left) * (0.0 if terminated[k] else nv[k]))
            weight *= GAMMA * left
        out.append(g)
    return out


@cases
@pytest.mark.parametrize("clip", [1.0, 0.6])
def test_retrace(ends, clip):
    """Munos et al. 2016, eq. 4: ``q`` and all errors to the end of the episode, by the products of the weights between."""
    d = rollout(ends)
    got = run(lambda s, v, nv, r: rlfx.retrace(s, v, nv, r, gamma=GAMMA, lam=LAM, clip=clip), d)
    q, nv, terminated, done = numbers(d)
    c = LAM * np.minimum(np.exp(d.log_rho.astype(float)), clip)
    expected = []
    for t in range(T):
        total, weight = q[t], 1.0
        for k in range(t, T):
            weight *= GAMMA * c[k] if k > t else 1.0
            total += weight * (d.reward[k] + GAMMA * ~terminated[k] * nv[k] - q[k])
            if done[k]:
                break
        expected.append(total)
    close(got, expected)


@cases
def test_q_lambda_and_upgo(ends):
    d = rollout(ends)
    q, nv, terminated, _ = numbers(d)
    got = run(
        lambda s, v, nv, r: (
            rlfx.q_lambda(s, nv, r > 0.0, gamma=GAMMA, lam=LAM),
            rlfx.q_lambda(s, nv, True, gamma=GAMMA, lam=LAM),
            rlfx.upgo(s, v, nv, gamma=GAMMA),
        ),
        d,
    )
    better = d.reward + GAMMA * np.where(terminated, 0.0, nv) >= q
    for g, goes_on in zip(got, (LAM * (d.log_rho > 0), np.full(T, LAM), better), strict=True):
        close(g, forward(d, goes_on))


@cases
def test_gradients_reach_the_critic_through_every_kind_of_end(ends):
    d = rollout(ends)

    def total(w):
        return run(lambda s, v, nv, r: rlfx.gae(s, v, nv, gamma=GAMMA, lam=LAM) ** 2, d._replace(w=w)).sum()

    def by_hand(w):
        v, nv, terminated, done = numbers(d._replace(w=w))
        a, out = 0.0, []
        for t in reversed(range(T)):
            a = d.reward[t] + GAMMA * (not terminated[t]) * nv[t] - v[t] + GAMMA * LAM * (not done[t]) * a
            out.append(a**2)
        return sum(out)

    expected = [(by_hand(d.w + e) - by_hand(d.w - e)) / 2e-5 for e in 1e-5 * np.eye(2)]
    np.testing.assert_allclose(jax.grad(total)(jnp.asarray(d.w)), expected, rtol=1e-3, atol=1e-3)


def test_in_a_batch_every_environment_has_its_own_ends():
    rollouts = [rollout(ENDS[name], seed) for seed, name in enumerate(["several", "truncated", "terminated"])]

    def f(p, obs, t):
        d = {k: rlfx.inputs(getattr(p, k))[t] for k in ("reward", "terminated", "truncated", "final_obs")}
        step, value = Step(**d), critic(p.w, obs)
        following = rlfx.next_value(lambda o: critic(p.w, o), step, value)
        return rlfx.inputs(p.obs)[t], rlfx.gae(step, value, following, gamma=GAMMA, lam=LAM)

    stacked = Data(*(jnp.stack([getattr(r, k) for r in rollouts], 1) for k in Data._fields))
    stacked = stacked._replace(w=jnp.asarray(rollouts[0].w), obs=stacked.obs[1:])
    first = jnp.stack([r.obs[0] for r in rollouts])
    out = rlfx.unroll(f, length=T, batch=3)(stacked, first)[1]
    for b, r in enumerate(rollouts):
        gae = lambda step, v, nv, _: rlfx.gae(step, v, nv, gamma=GAMMA, lam=LAM)  # noqa: E731
        close(out[:, b], run(gae, r._replace(w=rollouts[0].w)))


@pytest.mark.parametrize("which", ["t:", "t:t + 3", ":t + 1", "t - t % 4:t - t % 4 + 4", ":"])
@pytest.mark.parametrize("per_step", [False, True])
def test_discounted_sum_of_any_slice(which, per_step):
    rng = np.random.default_rng(0)
    r, d = rng.normal(size=T).astype(np.float32), rng.choice([0.0, 0.5, 0.9], T).astype(np.float32)

    def f(p, c, t):
        reward, discount = rlfx.inputs(p["r"]), rlfx.inputs(p["d"])
        at = {
            "t:": slice(t, None), "t:t + 3": slice(t, t + 3), ":t + 1": slice(None, t + 1),
            "t - t % 4:t - t % 4 + 4": slice(t - t % 4, t - t % 4 + 4), ":": slice(None),
        }[which]  # fmt: skip
        return c, rlfx.discounted_sum(reward[at], discount[at] if per_step else 0.9)

    p = {"r": jnp.asarray(r), "d": jnp.asarray(d)}
    program = rlfx.unroll(f, length=T)

    def by_hand(r, d):
        out = []
        for t in range(T):
            lo, hi = {"t:": (t, T), "t:t + 3": (t, t + 3), ":t + 1": (0, t + 1), ":": (0, T)}.get(
                which, (t - t % 4, t - t % 4 + 4)
            )
            total, weight = 0.0, 1.0
            for k in range(lo, min(hi, T)):
                total, weight = total + weight * r[k], weight * (d[k] if per_step else 0.9)
            out.append(total)
        return np.array(out)

    close(program(p, None)[1], by_hand(r.astype(float), d.astype(float)))
    weights = jnp.asarray(rng.normal(size=T), jnp.float32)
    grad = jax.grad(lambda p: (program(p, None)[1] * weights).sum())(p)
    objective = lambda r, d: float((by_hand(r, d) * np.asarray(weights, float)).sum())  # noqa: E731
    eye = 1e-6 * np.eye(T)
    close(grad["r"], [(objective(r + e, d) - objective(r - e, d)) / 2e-6 for e in eye])
    close(grad["d"], [(objective(r, d + e) - objective(r, d - e)) / 2e-6 for e in eye])


def test_discounted_sum_of_vectors():
    r = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    out = rlfx.unroll(lambda p, c, t: (c, rlfx.discounted_sum(rlfx.inputs(p)[t:], 0.5)), length=4)(
        jnp.asarray(r), None
    )[1]
    expected = [sum(0.5 ** (k - t) * r[k] for k in range(t, 4)) for t in range(4)]
    close(out, expected)
