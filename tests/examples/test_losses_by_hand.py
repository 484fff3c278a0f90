"""Losses of recipes that go through time, against loops in NumPy and float64; gradients against their central differences.

What is a constant in a loss is one in the loop, too: it is computed from parameters that the differences do not move.
"""

import dataclasses

import apg
import awr
import jax
import learned_discount
import networks
import numpy as np
import ppo
import pytest
import r2d2
import sac
import tasks

import rlfx

pytestmark = pytest.mark.usefixtures("lenient")
KEY = jax.random.key(0)


def numbers(like, seed, scale=0.7):
    """Random numbers like ``like``: networks without symmetries."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: (scale * rng.normal(size=x.shape)).astype(np.float32), like)


def double(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def gradient(fn, tree, eps=1e-6):
    """Central differences of ``fn`` at ``tree``, number by number."""
    leaves, treedef = jax.tree.flatten(double(tree))
    slopes = [np.zeros_like(x) for x in leaves]
    for leaf, slope in zip(leaves, slopes, strict=True):
        for at in np.ndindex(leaf.shape):
            here, values = leaf[at], []
            for leaf[at] in (here - eps, here + eps):
                values.append(fn(jax.tree.unflatten(treedef, leaves)))
            leaf[at], slope[at] = here, (values[1] - values[0]) / (2 * eps)
    return jax.tree.unflatten(treedef, slopes)


def layers(params, x):
    *hidden, (w_out, b_out) = params
    for w, b in hidden:
        x = np.tanh(x @ w + b)
    return x @ w_out + b_out


def assert_gradient(got, expected):
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=2e-3, atol=1e-5), got, expected)
    assert all(np.abs(x).max() > 5e-4 for x in jax.tree.leaves(expected))


# -- R2D2


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def remembered(params, h, obs):
    """One step of the recurrent network: ``(h, q)``."""
    x = np.tanh(layers(params["embed"], obs)) @ params["gru"]["w"] + params["gru"]["b"]
    (xr, xz, xn), (hr, hz, hn) = np.split(x, 3, -1), np.split(h @ params["gru"]["u"], 3, -1)
    z = sigmoid(xz + hz)
    h = z * h + (1 - z) * np.tanh(xn + sigmoid(xr + hr) * hn)
    return h, layers(params["head"], h)


def values_along(params, sequence, h):
    """What a network says along a sequence: ``q[T, B, actions]``, and its memories before each step."""
    q, memories = [], []
    for obs, done in zip(sequence.obs, sequence.done, strict=True):
        memories.append(h)
        h, now = remembered(params, h, obs)
        h = np.where(done[:, None], 0.0, h)
        q.append(now)
    return np.array(q), memories


def lambda_targets(sequence, judged):
    """From the step before the last one backwards; of the last one there is a value alone."""
    reward, going = sequence.reward, r2d2.GAMMA * (1.0 - sequence.done)
    target = np.zeros_like(reward)
    target[-1] = judged[-1]
    for t in range(len(reward) - 2, -1, -1):
        ahead = (1 - r2d2.LAMBDA) * judged[t + 1] + r2d2.LAMBDA * target[t + 1]
        target[t] = reward[t] + going[t] * ahead
    return target


def test_r2d2_learns_sequences():
    """The burn-in brings memories up to date and learns nothing; targets are double, mixed, and cut at ends."""
    T, B, hidden = r2d2.BURN + r2d2.LEARNED, r2d2.SAMPLES, 3
    like = jax.eval_shape(lambda: r2d2.make(length=24, envs=2, hidden=hidden).init(KEY).carry.learner.value.params)
    params, target = numbers(like, 1), numbers(like, 2)
    rng = np.random.default_rng(3)
    sequence = r2d2.Transition(
        rng.normal(size=(T, B, r2d2.OBS)), rng.normal(size=(T, B, hidden)), rng.integers(0, r2d2.ACTIONS, (T, B)),
        rng.normal(size=(T, B)), rng.random((T, B)) < 0.15,
    )  # fmt: skip
    given = r2d2.Transition(*(x.astype(d) for x, d in zip(sequence, "ffif?", strict=True)))

    def loss(params):
        return r2d2.sequence_loss((params, target, given), (given.h[0], given.h[0]))[0]

    fixed = double(params)
    q, memories = values_along(fixed, sequence, sequence.h[0])
    best = q.argmax(-1)
    of_target, _ = values_along(double(target), sequence, sequence.h[0])
    judged = np.take_along_axis(of_target, best[..., None], -1)[..., 0]
    assert (best != of_target.argmax(-1)).mean() > 0.2  # who chooses makes a difference
    aim = lambda_targets(sequence, judged)

    def by_hand(params):
        learned = r2d2.Transition(*(x[r2d2.BURN :] for x in sequence))
        q, _ = values_along(params, learned, memories[r2d2.BURN])
        error = np.take_along_axis(q, learned.action[..., None], -1)[..., 0] - aim[r2d2.BURN :]
        return (error[:-1] ** 2).sum() / (T * B)

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(value, by_hand(fixed), rtol=1e-4)
    assert_gradient(grads, gradient(by_hand, params))


# -- analytic policy gradients


def swing(theta, speed, torque):
    """Pendulum-v1's equations: the next angle and velocity, and the reward."""
    angle = (theta + np.pi) % (2 * np.pi) - np.pi
    reward = -(angle**2 + 0.1 * speed**2 + 0.001 * torque**2)
    speed = np.clip(speed + (15.0 * np.sin(theta) + 3.0 * torque) * 0.05, -8.0, 8.0)
    return theta + 0.05 * speed, speed, reward


def seen(theta, speed):
    return np.stack([np.cos(theta), np.sin(theta), speed], -1)


def test_apg_goes_through_the_dynamics():
    """The discounted return to the window's end or the episode's, and the value of what it ends in; the critic learns apart."""
    T, B, hidden = 6, 5, 4
    agent = jax.eval_shape(lambda: apg.make(envs=B, hidden=(hidden,)).init(KEY))
    params, target = numbers(agent.params, 1), numbers(agent.params["critic"], 2)
    rng = np.random.default_rng(3)
    theta, speed = (rng.normal(size=B).astype(np.float32) for _ in range(2))
    state = type(agent.state)(theta, speed, np.int32([0, 197, 198, 0, 194]))  # 3, 2 and 6 steps are left
    carry = apg.Carry(state, np.ones(B, np.float32))
    loss = rlfx.compile(apg.apg, length=T, batch=B)

    # From the program: the noise, and where an episode begins anew. All else is made here.
    def told(params, carry, t):
        noise = jax.random.normal(t.key_for("noise"), (1,))[0]
        return apg.apg(params, carry, t)[1], (carry.state, noise)

    _, (begins, noise) = jax.jit(rlfx.unroll(told, length=T, batch=B))((params, target), carry, KEY)
    noise = apg.NOISE * np.float64(noise)
    ends = np.int64(state.time)[None] + np.arange(1, T + 1)[:, None] == 200
    assert ends.sum() == 3
    target64, fixed = double(target), double(params)

    def played(actor):
        """``(theta, speed)`` at each step and after it, before a reset, and the rewards; ``[T, B]`` each."""
        theta, speed, out = np.float64(begins.theta[0]), np.float64(begins.theta_dot[0]), []
        for t in range(T):
            action = np.clip(np.tanh(layers(actor, seen(theta, speed)))[:, 0] + noise[t], -1.0, 1.0)
            *after, reward = swing(theta, speed, 2.0 * action)
            out.append((theta, speed, *after, apg.REWARD_SCALE * reward))
            if t < T - 1:
                anew = np.float64(begins.theta[t + 1]), np.float64(begins.theta_dot[t + 1])
                theta, speed = (np.where(ends[t], new, x) for new, x in zip(anew, after, strict=True))
        return (np.array(x) for x in zip(*out, strict=True))

    def value_of(critic, theta, speed):
        return layers(critic, seen(theta, speed))[..., 0]

    def reached(actor):
        _, _, theta, speed, reward = played(actor)
        following, total = value_of(target64, theta, speed), 0.0
        for b in range(B):
            weight = 1.0
            for t in range(T):
                last = ends[t, b] or t == T - 1
                total += weight * (reward[t, b] + (apg.GAMMA * following[t, b] if last else 0.0))
                weight = 1.0 if ends[t, b] else apg.GAMMA * weight
        return total / (T * B)

    theta, speed, *after, reward = played(fixed["actor"])
    np.testing.assert_allclose(theta, begins.theta, atol=1e-4)  # the program went the same way
    following, aim = value_of(target64, *after), np.zeros((T, B))
    for t in reversed(range(T)):
        cut = ends[t] | (t == T - 1)
        later = 0.0 if t == T - 1 else aim[t + 1]
        ahead = np.where(cut, following[t], (1 - apg.LAMBDA) * following[t] + apg.LAMBDA * later)
        aim[t] = reward[t] + apg.GAMMA * ahead

    def by_hand(params):
        error = value_of(params["critic"], theta, speed) - aim
        return 0.5 * (error**2).mean() - reached(params["actor"])

    value, grads = jax.jit(jax.value_and_grad(lambda p: loss((p, target), carry, KEY)[0]))(params)
    np.testing.assert_allclose(value, by_hand(fixed), rtol=1e-4)
    assert_gradient(grads, gradient(by_hand, params))


# -- a learned discount


def generalised(reward, value, following, top, cut, gamma, lam):
    """Advantages backwards: nothing follows the top; where an episode was cut, and at the end, a value does."""
    gain, later = np.zeros_like(reward), 0.0
    for t in range(len(reward) - 1, -1, -1):
        delta = reward[t] + gamma * np.where(top[t], 0.0, following[t]) - value[t]
        gain[t] = later = delta + gamma * lam * np.where(top[t] | cut[t], 0.0, later)
    return gain


def test_what_an_update_learns_of_its_discount():
    """Both losses, and the mixed derivative that the meta-gradient is made of: of the gradient, by the discount."""
    L, T, B = learned_discount, 20, 6
    params = numbers(jax.eval_shape(lambda: L.make(envs=B, hidden=(3,)).init(KEY)).params, 1)
    direction = numbers(params, 2)
    state = tasks.Slope(np.int32([0, 3, 7, 5, 0, 0]), np.int32([0, 4, 9, 15, 1, 8]))

    def told(params, state, t):
        state, *_, action = L.acted(params, state, t)
        return state, action

    _, action = jax.jit(rlfx.unroll(told, length=T, batch=B))(params, state, KEY)
    action = np.asarray(action)
    place, time = np.zeros((2, T + 1, B), int)
    place[0], time[0] = state.place, state.time
    top, cut, after = (np.zeros((T, B), d) for d in (bool, bool, int))
    for t in range(T):
        after[t] = place[t] + action[t]
        top[t], cut[t] = after[t] == tasks.Climb.height, time[t] + 1 == 2 * tasks.Climb.height
        place[t + 1], time[t + 1] = (np.where(top[t] | cut[t], 0, x) for x in (after[t], time[t] + 1))
    assert top.any()
    assert (cut & ~top).any()
    reward = 1.0 * top - tasks.Climb.effort * action
    seen_at = lambda place: np.stack([place / tasks.Climb.height, np.ones(place.shape)], -1)  # noqa: E731
    obs, following = seen_at(place[:-1]), seen_at(after)
    fixed = double(params)

    def gains(name, discount):
        value, next_value = (layers(fixed[name], x)[..., 0] for x in (obs, following))
        return generalised(reward, value, next_value, top, cut, discount, L.LAMBDA), value

    def log_policy(params):
        logits = layers(params["actor"], obs)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return log_probs, np.take_along_axis(log_probs, action[..., None], -1)[..., 0]

    def inner(params, discount):
        log_probs, chosen = log_policy(params)
        loss = -chosen * gains("critic", discount)[0] + L.ENTROPY * (np.exp(log_probs) * log_probs).sum(-1)
        for name, counts in (("critic", discount), ("judge", L.COUNTS)):
            gain, value = gains(name, counts)
            loss = loss + 0.5 * (layers(params[name], obs)[..., 0] - (gain + value)) ** 2
        return loss.mean()

    def along(discount, eps=1e-4):
        moved = [jax.tree.map(lambda w, d: w + e * d, fixed, double(direction)) for e in (-eps, eps)]
        return (inner(moved[1], discount) - inner(moved[0], discount)) / (2 * eps)

    discount, of_inner, of_outer = 0.7, *(rlfx.compile(f, length=T, batch=B) for f in (L.inner, L.outer))

    @jax.jit
    def program(discount):
        def slope(discount):
            loss, grads = jax.value_and_grad(lambda p: of_inner((p, discount), state, KEY)[0])(params)
            return sum(jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), grads, direction))), (loss, grads)

        return *jax.grad(slope, has_aux=True)(discount), of_outer(params, state, KEY)[0]

    mixed, (loss, grads), worth = program(np.float32(discount))
    np.testing.assert_allclose(loss, inner(fixed, discount), rtol=1e-4)
    assert_gradient(grads, gradient(lambda params: inner(params, discount), params))
    np.testing.assert_allclose(mixed, (along(discount + 1e-4) - along(discount - 1e-4)) / 2e-4, rtol=1e-3)
    np.testing.assert_allclose(worth, -(log_policy(fixed)[1] * gains("judge", L.COUNTS)[0]).mean(), rtol=1e-4)


# -- AWR


def test_awr_learns_from_a_log():
    """Lambda returns that end where what follows is of another episode; better actions count more, at most so much."""
    T, B = 9, 3
    params = numbers(jax.eval_shape(lambda: awr.make(sac_updates=1, length=2, envs=2, hidden=(3,)).init(KEY)).params, 1)
    rng = np.random.default_rng(2)
    obs, action, reward = rng.normal(size=(T + 1, B, awr.OBS)), rng.normal(size=(T, B, 1)), rng.normal(size=(T, B))
    cut, terminated = (rng.random((T, B)) < p for p in (0.2, 0.15))
    following = np.where((cut | terminated)[..., None], rng.normal(size=(T, B, awr.OBS)), obs[1:])
    log = awr.sac.Transition(*(np.float32(x) for x in (obs[:-1], action, reward)), terminated, np.float32(following))
    fixed = double(params)

    value, next_value = (layers(fixed["critic"], x)[..., 0] for x in (obs[:-1], following))
    target = np.zeros((T, B))
    for t in reversed(range(T)):
        later = target[t + 1] if t < T - 1 else 0.0
        ends = cut[t] | terminated[t] | (t == T - 1)
        ahead = np.where(ends, next_value[t], (1 - awr.LAMBDA) * next_value[t] + awr.LAMBDA * later)
        target[t] = reward[t] + awr.GAMMA * np.where(terminated[t], 0.0, ahead)
    weight = np.minimum(np.exp((target - value) / awr.TEMPERATURE), awr.LARGEST)
    assert (weight == awr.LARGEST).any()

    def by_hand(params):
        mean, log_std = np.tanh(layers(params["actor"], obs[:-1])), params["log_std"]
        log_prob = (-0.5 * ((action - mean) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)).sum(-1)
        return (0.5 * (layers(params["critic"], obs[:-1])[..., 0] - target) ** 2 - weight * log_prob).mean()

    @jax.jit
    def program(params):
        _, target = rlfx.unroll(awr.targets, length=T, batch=B)((params, log), np.zeros(B, np.float32))
        flat = jax.tree.map(lambda x: x.reshape(T * B, *x.shape[2:]), awr.Sample(log.obs, log.action, target))
        return target, *jax.value_and_grad(awr.awr_loss)(params, flat)

    found, loss, grads = program(params)
    np.testing.assert_allclose(found, target, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(loss, by_hand(fixed), rtol=1e-4)
    assert_gradient(grads, gradient(by_hand, params))


def test_the_log_is_in_the_order_of_time():
    log = jax.jit(lambda key: awr.logged(key, 3, length=4, envs=2, hidden=(4,)))(KEY)
    assert log.reward.shape == (12, 2)
    np.testing.assert_array_equal(log.next_obs[:-1], log.obs[1:])
    assert (log.next_obs[-1] != log.obs[-1]).any(-1).all()


# -- parts


def test_a_convolution_is_a_product_of_patches():
    shape, channels, sizes = (6, 5, 2), 3, (4, 2)
    params = numbers(jax.eval_shape(lambda: networks.init_cnn(KEY, shape, channels, sizes)), 1)
    x = numbers(np.zeros(shape), 2)
    ((w, b),) = params["kernel"]
    hidden = np.zeros((4, 3, channels))
    for i, j in np.ndindex(4, 3):
        hidden[i, j] = np.einsum("ijc,ijcd->d", x[i : i + 3, j : j + 3], w.reshape(3, 3, 2, channels)) + b
    np.testing.assert_allclose(
        networks.cnn(params, x), layers(params["head"], np.maximum(hidden, 0).ravel()), rtol=1e-4
    )


def test_observations_are_brought_to_their_bounds():
    seen = []
    low, high = ppo.CAR.observation_space.low, ppo.CAR.observation_space.high
    network = ppo.of_scaled(ppo.CAR, lambda params, obs: seen.append(obs))
    for obs in (low, (low + high) / 2, high):
        network(None, obs)
    np.testing.assert_allclose(seen, [[-1, -1], [0, 0], [1, 1]], atol=1e-6)


def test_random_actions_are_held(monkeypatch):
    """Four steps each, in each environment its own; then the policy acts."""
    monkeypatch.setattr(sac, "SAMPLES", 2)
    task = dataclasses.replace(sac.CAR, capacity=24, explore=16, hold=4)
    recipe = sac.make(task, length=24, envs=2, hidden=(4,))
    agent, _ = jax.jit(lambda key: recipe.update(recipe.init(key), key))(KEY)
    action = np.asarray(agent.carry.memory.data.action)[..., 0]  # [2, 24]
    held = action[:, :16].reshape(2, 4, 4)
    np.testing.assert_array_equal(held, held[..., :1].repeat(4, -1))
    assert len(np.unique(held)) == 8
    assert len(np.unique(action[:, 16:])) == 16


def test_a_policy_has_a_share_of_the_force(monkeypatch):
    """Its actions stay between -1 and 1, and a fourth of each moves the pendulum."""
    monkeypatch.setattr(sac, "SAMPLES", 2)
    task = dataclasses.replace(sac.PENDULUM, capacity=24, explore=12, bounds=4.0, temperature=0.1)
    recipe = sac.make(task, length=24, envs=2, hidden=(4,))
    agent = recipe.init(KEY)
    np.testing.assert_allclose(np.exp(agent.carry.learner.value.params.log_alpha), 0.1, rtol=1e-6)
    agent, _ = jax.jit(recipe.update)(agent, KEY)
    x = jax.tree.map(np.asarray, agent.carry.memory.data)
    assert np.abs(x.action).max() <= 1.0 < recipe.env.action_space.high.max()
    _, sin, speed = np.moveaxis(x.obs, -1, 0)
    after = np.clip(speed + (15.0 * sin + 3.0 * (2.0 * x.action[..., 0] / 4.0)) * 0.05, -8.0, 8.0)  # g = 10, m = l = 1
    np.testing.assert_allclose(x.next_obs[..., 2], after, atol=1e-4)


@pytest.mark.parametrize("entropy", [-1.0, 0.5])
def test_the_entropy_aimed_at(entropy):
    """The temperature's gradient is zero where the log-probability is minus it, of each action."""
    agent = sac.make(length=3, envs=2, hidden=(4,)).init(KEY)
    params, target, _ = agent.carry.learner.value
    x = jax.tree.map(lambda leaf: leaf[0, 0], agent.carry.memory.data)
    policy = sac.actor(params.actor, x.obs)
    log_prob = policy.log_prob(policy.sample(jax.random.split(KEY)[0]))
    slope = jax.grad(sac.sac_loss)(params, target, x, KEY, entropy=entropy).log_alpha
    np.testing.assert_allclose(slope, -(log_prob + entropy), rtol=1e-5)
