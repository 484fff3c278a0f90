"""Wrappers against plain Python references; the protocol's checks; rollouts; pictures."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import rlfx.envs
from rlfx.envs import Environment, Step, spaces
from rlfx.errors import EnvError, RlfxError
from rlfx.transforms.fuse_steps import fuse_steps
from tests.leaks import among_new_objects


@dataclasses.dataclass(frozen=True)
class Counter(Environment):
    """Counts up to ``length``, then terminates; the reward is the count times the action."""

    length: int = 3

    name = "counter"
    observation_space = spaces.Box(0.0, 10.0, (2,))
    action_space = spaces.Box(-1.0, 1.0, ())

    def reset(self, key):
        return jnp.int32(0)

    def observe(self, state):
        return jnp.stack([state, state * state]).astype(jnp.float32)

    def transition(self, key, state, action):
        state = state + 1
        reward = state.astype(jnp.float32) * action
        return state, Step(reward, state >= self.length, jnp.zeros((), bool), self.observe(state))


def run(env, actions, key=None):
    key = jax.random.key(0) if key is None else key

    def body(state, action):
        state, step = env.step(key, state, action)
        return state, (env.observe(state), step)

    state = env.reset(key)
    return env.observe(state), jax.lax.scan(body, state, jnp.asarray(actions, jnp.float32))[1]


cartpole = rlfx.envs.make("CartPole-v1")
WRAPPERS = {
    "auto_reset": rlfx.envs.auto_reset,
    "cached": lambda e: rlfx.envs.auto_reset(e, reset="cached", cache=2),
    "time_limit": lambda e: rlfx.envs.time_limit(e, 2),
    "statistics": lambda e: rlfx.envs.episode_statistics(rlfx.envs.auto_reset(e)),
    "normalize_observation": rlfx.envs.normalize_observation,
    "normalize_reward": rlfx.envs.normalize_reward,
    "frame_stack": lambda e: rlfx.envs.frame_stack(e, 3),
    "action_repeat": lambda e: rlfx.envs.action_repeat(e, 2),
    "clip_reward": rlfx.envs.clip_reward,
    "clip_action": rlfx.envs.clip_action,
    "stop_gradient": rlfx.envs.stop_gradient,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_every_wrapper_keeps_the_protocol(name):
    env = WRAPPERS[name](Counter())
    rlfx.envs.check(env)
    obs = env.observe(env.reset(jax.random.key(0)))
    assert (obs.shape, obs.dtype) == (env.observation_space.shape, env.observation_space.dtype)
    jaxpr = jax.make_jaxpr(env.step)(jax.random.key(0), env.reset(jax.random.key(0)), jnp.float32(0.5))
    assert all(rlfx.envs.STEP_SCOPE in str(e.source_info.name_stack) for e in jaxpr.jaxpr.eqns)


@pytest.mark.parametrize("reset", ["fresh", "cached", "optimistic"])
def test_auto_reset(reset):
    env = rlfx.envs.auto_reset(Counter(), reset=reset)
    _, (obs, step) = run(env, np.ones(7))
    np.testing.assert_array_equal(obs[:, 0], [1, 2, 0, 1, 2, 0, 1])
    np.testing.assert_array_equal(step.final_obs[:, 0], [1, 2, 3, 1, 2, 3, 1])
    np.testing.assert_array_equal(step.terminated, [0, 0, 1, 0, 0, 1, 0])


def test_cached_resets_go_round():
    env = rlfx.envs.auto_reset(rlfx.envs.make("CartPole-v1", auto_reset=False), reset="cached", cache=2)
    state = env.reset(jax.random.key(0))
    seen = [env.observe(state)]
    for i in range(80):
        state, step = env.step(jax.random.key(i), state, jnp.int32(0))
        if bool(step.terminated):
            seen.append(env.observe(state))
    assert len(seen) >= 5
    np.testing.assert_array_equal(seen[0], seen[2])
    np.testing.assert_array_equal(seen[1], seen[3])
    assert not np.array_equal(seen[0], seen[1])


@pytest.mark.optimised  # two programs are equal bit for bit
def test_optimistic_resets_are_fresh_until_too_many_end_together():
    bare = rlfx.envs.make("CartPole-v1", auto_reset=False)
    fresh, few = rlfx.envs.auto_reset(bare), rlfx.envs.auto_reset(bare, reset="optimistic", ratio=4)
    n, seen = 8, set()
    states = jax.vmap(few.reset)(jax.random.split(jax.random.key(0), n))
    steps = [jax.jit(jax.vmap(env.step)) for env in (fresh, few)]
    for t in range(60):
        keys = jax.random.split(jax.random.key(t), n)
        (expected, one), (states, other) = (step(keys, states, jnp.arange(n) % 2) for step in steps)
        assert_same(one, other)
        done = np.flatnonzero(other.terminated)
        seen.add(len(done) > 2)
        for i, b in enumerate(done):  # the third that ends begins as the first, and so on
            source = expected if i < 2 else states
            row = b if i < 2 else done[i % 2]
            assert_same(jax.tree.map(lambda x: x[b], states), jax.tree.map(lambda x: x[row], source))
        going = np.flatnonzero(~np.asarray(other.terminated))
        assert_same(*(jax.tree.map(lambda x: x[going], s) for s in (states, expected)))
    assert seen == {False, True}


def test_optimistic_resets_draw_few_states():
    """A sixteenth of the random numbers; and a nested vmap, and one environment alone."""
    env = rlfx.envs.auto_reset(rlfx.envs.make("CartPole-v1", auto_reset=False), reset="optimistic")
    keys = jax.random.split(jax.random.key(0), 64)
    states = jax.vmap(env.reset)(keys)
    jaxpr = str(jax.make_jaxpr(jax.vmap(env.step))(keys, states, jnp.zeros(64, jnp.int32)))
    assert "u32[4,4]" in jaxpr
    assert "u32[64,4]" not in jaxpr
    folded = jax.tree.map(lambda x: x.reshape(4, 16), (keys, states, jnp.zeros(64, jnp.int32)))
    assert jax.vmap(jax.vmap(env.step))(*folded)[1].reward.shape == (4, 16)
    assert jax.jit(env.step)(keys[0], env.reset(keys[1]), jnp.int32(0))[1].reward.shape == ()


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_time_limit_truncates_and_does_not_terminate():
    env = rlfx.envs.auto_reset(rlfx.envs.time_limit(Counter(), 2))
    _, (obs, step) = run(env, np.ones(5))
    np.testing.assert_array_equal(step.truncated, [0, 1, 0, 1, 0])
    assert not step.terminated.any()
    np.testing.assert_array_equal(obs[:, 0], [1, 0, 1, 0, 1])
    both = rlfx.envs.time_limit(Counter(length=2), 2)
    _, (_, step) = run(both, np.ones(2))
    assert bool(step.terminated[1])
    assert bool(step.truncated[1])


def test_episode_statistics():
    env = rlfx.envs.episode_statistics(rlfx.envs.auto_reset(Counter()))
    _, (_, step) = run(env, [1.0, 1.0, 0.5, 1.0])
    np.testing.assert_allclose(step.info["episode_return"], [1, 3, 4.5, 1])
    np.testing.assert_array_equal(step.info["episode_length"], [1, 2, 3, 1])


def test_normalize_observation_equals_numpy():
    env = rlfx.envs.normalize_observation(rlfx.envs.auto_reset(Counter(length=50)))
    _, (obs, step) = run(env, np.ones(20))
    raw = np.stack([np.arange(21), np.arange(21) ** 2], axis=1).astype(np.float64)
    for t in range(1, 21):
        expected = (raw[t] - raw[: t + 1].mean(0)) / np.sqrt(raw[: t + 1].var(0, ddof=1) + 1e-8)
        np.testing.assert_allclose(obs[t - 1], expected, rtol=1e-4)
        np.testing.assert_allclose(step.final_obs[t - 1], expected, rtol=1e-4)


def test_normalize_reward_equals_numpy():
    env = rlfx.envs.normalize_reward(rlfx.envs.auto_reset(Counter(length=3)), gamma=0.9)
    actions = np.linspace(-1, 1, 12)
    _, (_, step) = run(env, actions)
    seen, g, count = [0.0], 0.0, 0
    for t in range(12):
        count += 1
        reward = np.float32(count * actions[t])
        g = 0.9 * g + reward
        seen.append(g)
        expected = np.clip(reward / np.sqrt(np.var(seen, ddof=1) + 1e-8), -10, 10)
        np.testing.assert_allclose(step.reward[t], expected, rtol=2e-4, atol=1e-5)
        np.testing.assert_allclose(step.info["reward"][t], reward, rtol=1e-6)
        if count == 3:
            g, count = 0.0, 0


def test_frame_stack_restarts_with_the_episode():
    env = rlfx.envs.auto_reset(rlfx.envs.frame_stack(Counter(), 2))
    first, (obs, step) = run(env, np.ones(4))
    np.testing.assert_array_equal(first[:, 0], [0, 0])
    np.testing.assert_array_equal(obs[..., 0], [[0, 1], [1, 2], [0, 0], [0, 1]])
    np.testing.assert_array_equal(step.final_obs[2, :, 0], [2, 3])


def test_action_repeat_stops_at_the_end():
    env = rlfx.envs.auto_reset(rlfx.envs.action_repeat(Counter(), 2))
    _, (_, step) = run(env, np.ones(4))
    np.testing.assert_array_equal(step.reward, [1 + 2, 3, 1 + 2, 3])
    np.testing.assert_array_equal(step.terminated, [0, 1, 0, 1])
    np.testing.assert_array_equal(step.final_obs[:, 0], [2, 3, 2, 3])


def test_clips():
    _, (_, step) = run(rlfx.envs.clip_reward(Counter(length=9), -0.5, 2.0), [1, 1, 1, -1])
    np.testing.assert_array_equal(step.reward, [1, 2, 2, -0.5])
    _, (_, step) = run(rlfx.envs.clip_action(Counter(length=9)), [7.0, -7.0])
    np.testing.assert_array_equal(step.reward, [1, -2])


def test_gradients_stop_unless_differentiable():
    def reward(env):
        state = env.reset(jax.random.key(0))
        return jax.grad(lambda a: env.step(jax.random.key(1), state, a)[1].reward)(jnp.array([0.5]))

    assert float(reward(rlfx.envs.make("Pendulum-v1"))[0]) == 0
    assert float(reward(rlfx.envs.make("Pendulum-v1", differentiable=True))[0]) == pytest.approx(-0.001)


# -- every wrapper, above a reset and below ----------------------------------------------------------------------------


class Loop:
    """An environment in plain Python: ``begin() -> obs``, ``step(action) -> obs, reward, terminated, truncated``."""

    def __init__(self, inner):
        self.inner = inner

    def begin(self):
        return self.inner.begin()

    def step(self, action):
        return self.inner.step(action)


class LoopCounter(Loop):
    def begin(self):
        self.count = 0
        return np.zeros(2)

    def step(self, action):
        self.count += 1
        return np.array([self.count, self.count**2], float), self.count * action, self.count >= self.inner, False


class LoopTimeLimit(Loop):
    def begin(self):
        self.time = 0
        return self.inner.begin()

    def step(self, action):
        self.time += 1
        obs, reward, terminated, truncated = self.inner.step(action)
        return obs, reward, terminated, truncated or self.time >= 2


class LoopStack(Loop):
    def begin(self):
        self.frames = [self.inner.begin()] * 2
        return np.stack(self.frames)

    def step(self, action):
        obs, *rest = self.inner.step(action)
        self.frames = [*self.frames[1:], obs]
        return np.stack(self.frames), *rest


class LoopRepeat(Loop):
    def step(self, action):
        total = 0.0
        for _ in range(2):
            obs, reward, terminated, truncated = self.inner.step(action)
            total += reward
            if terminated or truncated:
                break
        return obs, total, terminated, truncated


class LoopClip(Loop):
    def step(self, action):
        obs, reward, *rest = self.inner.step(action)
        return obs, min(max(reward, -1.0), 1.0), *rest


class LoopNormalize(Loop):
    seen = None

    def scaled(self, obs):
        self.seen = [*(self.seen or []), obs]
        deviation = np.sqrt(np.var(self.seen, axis=0, ddof=1) + 1e-8) if len(self.seen) > 1 else np.sqrt(1 + 1e-8)
        return np.clip((obs - np.mean(self.seen, axis=0)) / deviation, -10, 10)

    def begin(self):
        return self.scaled(self.inner.begin())

    def step(self, action):
        obs, *rest = self.inner.step(action)
        return self.scaled(obs), *rest


class LoopNormalizeReward(Loop):
    seen = (0.0,)

    def begin(self):
        self.total = 0.0
        return self.inner.begin()

    def step(self, action):
        obs, reward, *rest = self.inner.step(action)
        self.total = 0.99 * self.total + reward
        self.seen = [*self.seen, self.total]
        return obs, np.clip(reward / np.sqrt(np.var(self.seen, ddof=1) + 1e-8), -10, 10), *rest


LOOPS = {
    "time_limit": (lambda e: rlfx.envs.time_limit(e, 2), LoopTimeLimit),
    "frame_stack": (lambda e: rlfx.envs.frame_stack(e, 2), LoopStack),
    "action_repeat": (lambda e: rlfx.envs.action_repeat(e, 2), LoopRepeat),
    "clip_reward": (rlfx.envs.clip_reward, LoopClip),
    "statistics": (rlfx.envs.episode_statistics, Loop),
    "stop_gradient": (rlfx.envs.stop_gradient, Loop),
    "normalize_observation": (rlfx.envs.normalize_observation, LoopNormalize),
    "normalize_reward": (rlfx.envs.normalize_reward, LoopNormalizeReward),
}
STACKS = [(a,) for a in LOOPS] + [(a, b) for a in LOOPS for b in LOOPS if a != b]


def wrapped(names, at, reset):
    """``Counter`` below the wrappers, inner first, with automatic resets between them."""
    env = Counter()
    for i, name in enumerate((*names, "end")):
        env = rlfx.envs.auto_reset(env, reset=reset) if i == at else env
        env = env if name == "end" else LOOPS[name][0](env)
    return env


def refused(names, at):
    """A limit of repeated steps: there is no way beneath the reset, and none above it."""
    beyond = names[at:]
    return "action_repeat" in beyond and "time_limit" in beyond[beyond.index("action_repeat") :]


def test_every_wrapper_equals_a_loop_wherever_the_reset_is():
    """64 stacks of one and two wrappers, resets above, between and below them (without them, up to the first end)."""
    actions = np.linspace(-1, 1, 11)
    members = [(names, at) for names in STACKS for at in range(len(names) + 1) if not refused(names, at)]
    members = [m for m in members if len(m[0]) == 1] + members[16::4]
    members += [(names, None) for names in STACKS[:8]]  # no resets
    kinds = ["fresh", "cached", "optimistic"]
    envs = [wrapped(names, at, kinds[i % 3]) for i, (names, at) in enumerate(members)]
    assert len(envs) > 50
    results = jax.jit(lambda: [run(env, actions) for env in envs])()
    for (names, at), (first, (obs, step)) in zip(members, results, strict=True):
        loop = LoopCounter(3)
        for name in names:
            loop = LOOPS[name][1](loop)
        close = lambda a, b, at=(names, at): np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4, err_msg=str(at))  # noqa: E731
        close(first, loop.begin())
        length, total = 0, 0.0
        for t, action in enumerate(actions):
            final, reward, terminated, truncated = loop.step(action)
            close(step.final_obs[t], final)
            close(step.reward[t], reward)
            assert (bool(step.terminated[t]), bool(step.truncated[t])) == (terminated, truncated), (names, at, t)
            length, total = length + 1, total + reward
            if names[-1] == "statistics":
                close(step.info["episode_length"][t], length)
                close(step.info["episode_return"][t], total)
            if terminated or truncated:
                if at is None:
                    break
                length, total = 0, 0.0
                final = loop.begin()
            close(obs[t], final)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: rlfx.envs.auto_reset(cartpole), "CartPole-v1 begins new episodes by itself already"),
    (lambda: wrapped(("action_repeat", "time_limit"), 0, "fresh"), "time_limit of _ActionRepeat, which begins new episodes"),
    (lambda: rlfx.envs.time_limit(Again(), 5), "time_limit of Again, which begins new episodes"),
    (lambda: rlfx.envs.auto_reset(Mine(rlfx.envs.normalize_reward(Counter()))), "auto_reset of Mine: it stands above"),
    (lambda: fuse_steps(Counter(), 3, policy="random", outputs="statistics"), "statistics of counter, which does not begin"),
    (lambda: rlfx.envs.random_rollout(Counter(), 3, 5), "counter, which does not begin new episodes"),
])  # fmt: skip
def test_orders_that_cannot_be_put_right_are_refused(make, message):
    with pytest.raises(RlfxError, match=rf"(?s){message}.*Fix: "):
        make()


class Again(Counter):
    resets = True


class Mine(rlfx.envs.Wrapper):
    """A wrapper of a user's: nothing is known about what it remembers."""


def test_time_limits_go_beneath_the_reset():
    env = rlfx.envs.time_limit(rlfx.envs.make("CartPole-v1"), 5)
    rollout = jax.jit(
        lambda key: jax.lax.scan(lambda s, k: env.step(k, s, jnp.int32(0)), env.reset(key), jax.random.split(key, 20))
    )
    np.testing.assert_array_equal(np.flatnonzero(rollout(jax.random.key(0))[1].truncated), [4, 9, 14, 19])


# -- bad input -------------------------------------------------------------------------------------------------------


BAD_ACTIONS = {
    "shape": (jnp.zeros(3, jnp.int32), r"shape \(3,\).*needs \(\)(.|\n)*jax.vmap"),
    "dtype": (jnp.float32(1.0), r"dtype float32.*needs int32(.|\n)*astype"),
    "range": (jnp.int32(2), r"action 2 is outside(.|\n)*0, ..., 1"),
    "structure": ({"a": jnp.int32(0)}, "the action has structure"),
    "type": ("left", r"the action is str \('left'\), not an array"),
}


@pytest.mark.parametrize("case", BAD_ACTIONS)
def test_bad_actions_are_refused_at_the_boundary(case):
    action, message = BAD_ACTIONS[case]
    with pytest.raises(EnvError, match=message):
        cartpole.step(jax.random.key(0), cartpole.reset(jax.random.key(0)), action)


@pytest.mark.parametrize("torque", [2.5, np.nan])
def test_continuous_actions_outside_are_refused_at_the_boundary(torque):
    env, action = rlfx.envs.make("Pendulum-v1"), jnp.array([torque], jnp.float32)
    state = env.reset(jax.random.key(0))
    with pytest.raises(EnvError, match=r"is outside Box\(-2.0, 2.0(.|\n)*rlfx.envs.clip_action"):
        env.step(jax.random.key(0), state, action)
    if not np.isnan(torque):
        outer = rlfx.envs.clip_reward(rlfx.envs.clip_action(env))  # also below other wrappers
        clipped = outer.step(jax.random.key(0), state, action)[0]
        assert clipped.theta_dot == env.step(jax.random.key(0), state, jnp.array([2.0]))[0].theta_dot


@pytest.mark.parametrize("env", [
    cartpole, rlfx.envs.make("Pendulum-v1", auto_reset=False), Counter(), rlfx.envs.time_limit(Counter(), 3),
], ids=lambda env: env.name)  # fmt: skip
def test_a_reset_is_given_a_key(env):
    keys = jax.random.split(jax.random.key(0), 3)
    for given in ((), (0,), (keys,), (np.zeros(2),)):
        with pytest.raises(EnvError, match=rf"{env.name}: reset: key must be one key, got (.|\n)*Give key=jax.random.key\(0\)"):
            env.reset(*given)
    assert jax.tree.leaves(jax.vmap(env.reset)(keys))[0].shape[0] == 3
    env.reset(key=jax.random.PRNGKey(0))


def test_bad_actions_are_refused_inside_jit():
    state = cartpole.reset(jax.random.key(0))
    with pytest.raises(EnvError, match="needs int32"):
        jax.jit(cartpole.step)(jax.random.key(0), state, jnp.float32(1))
    checked = checkify.checkify(jax.jit(jax.vmap(rlfx.envs.check_actions(cartpole).step, (None, None, 0))))
    error, _ = checked(jax.random.key(0), state, jnp.array([0, 5]))
    assert "CartPole-v1: action 5 is outside" in error.get()
    assert checked(jax.random.key(0), state, jnp.array([0, 1]))[0].get() is None


class Leaking(Counter):
    kept = None

    def transition(self, key, state, action):
        if Leaking.kept is not None:
            state = state + Leaking.kept * 0
        after, step = super().transition(key, state, action)
        Leaking.kept = after
        return after, step


class Impure(Counter):
    calls = 0

    def transition(self, key, state, action):
        Impure.calls += 1
        return super().transition(key, state, action * Impure.calls)


class Unstable(Counter):
    def transition(self, key, state, action):
        after, step = super().transition(key, state, action)
        return after.astype(jnp.float32), step


class Batched(Counter):
    def transition(self, key, state, action):
        after, step = super().transition(key, state, action)
        return after, dataclasses.replace(step, reward=step.reward[None])


class Tuples(Counter):
    def transition(self, key, state, action):
        after, step = super().transition(key, state, action)
        return after, (step.reward, step.terminated)


class Gymnasiums(Counter):
    def transition(self, key, state, action):
        after, step = super().transition(key, state, action)
        return after, step.reward, False, False, {}


class Numbers(Counter):
    def transition(self, key, state, action):
        after, step = super().transition(key, state, action)
        return after, dataclasses.replace(step, reward=1.0)


class Flags(Counter):
    def transition(self, key, state, action):
        after, step = super().transition(key, state, action)
        return after, dataclasses.replace(step, truncated=False)


class Branching(Counter):
    def transition(self, key, state, action):
        return super().transition(key, state + 1 if action == 1 else state, action)


class Looking(Counter):
    def observe(self, state):
        return jnp.float32(np.asarray(state) + 0.5)

    def transition(self, key, state, action):
        after, step = super().transition(key, state, action)
        return after, dataclasses.replace(step, final_obs=jnp.float32(0))


class Weak(Counter):
    def reset(self, key):
        return {"n": super().reset(key), "last": jnp.where(jax.random.bernoulli(key), 1, 0)}

    def observe(self, state):
        return super().observe(state["n"] if isinstance(state, dict) else state)

    def transition(self, key, state, action):
        after, step = super().transition(key, state["n"], action)
        return {"n": after, "last": jnp.int32(0)}, step


@pytest.mark.parametrize(("env", "message"), [
    (Gymnasiums(), r"(?s)step returns a tuple of 5, not the state and a Step.*Return \(state, rlfx.envs.Step\(...\)\)"),
    (Numbers(), r"(?s)Step.reward is 1.0, a value of Python's, and no array.*Give jnp.float32\(1.0\)"),
    (Flags(), r"(?s)Step.truncated is False, a value of Python's.*Give jnp.bool_\(False\)"),
    (Branching(), r"(?s)asks for the value of an array, .*at test_wrappers.py:\d+ \(transition\).*Use jnp.where"),
    (Looking(), r"(?s)asks for the value of an array, .*at test_wrappers.py:\d+ \(observe\).*in the place of np"),
    (Weak(), r"(?s)reset gives int(32|64)\[\], weakly typed \(made of Python's numbers alone\), step int32\[\] for \['last'\]"),
    (Leaking(), "leaks a tracer"),
    (Impure(), "two steps with equal arguments differ"),
    (Unstable(), "the state's types differ"),
    (Batched(), r"Step.reward is float32\[1\]"),
    (Tuples(), "step returns tuple"),
])  # fmt: skip
def test_check_finds_what_is_wrong(env, message):
    with among_new_objects(), pytest.raises(EnvError, match=message):
        rlfx.envs.check(env)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: rlfx.envs.time_limit(Counter(), 0), "time_limit: steps must be a positive integer, got 0"),
    (lambda: rlfx.envs.frame_stack(Counter(), 0), "frame_stack: frames must be a positive integer, got 0"),
    (lambda: rlfx.envs.action_repeat(Counter(), 0), "action_repeat: repeats must be a positive integer, got 0"),
    (lambda: rlfx.envs.clip_action(cartpole), "Only the actions of a Box"),
    (lambda: rlfx.envs.auto_reset(Counter(), reset="often"), "reset must be \"fresh\", .*, got 'often'"),
    (lambda: rlfx.envs.auto_reset(Counter(), reset="optimistic", ratio=0), "auto_reset: ratio must be a positive integer, got 0"),
    (lambda: rlfx.envs.random_rollout("CartPole-v1", 0, 5), "num_envs must be a positive integer, got 0"),
    (lambda: rlfx.envs.random_rollout("CartPole-v1", 5, 0), "num_steps must be a positive integer, got 0"),
    (lambda: rlfx.envs.random_rollout("CartPole-v1", 2.5, 5), "num_envs must be a positive integer, got 2.5"),
])  # fmt: skip
def test_bad_arguments(make, message):
    with pytest.raises(EnvError, match=message):
        make()


# -- rollouts and pictures -------------------------------------------------------------------------------------------


def test_the_folder_of_a_picture_is_made(tmp_path):
    pytest.importorskip("PIL")
    env = rlfx.envs.make("Catch-bsuite")
    assert rlfx.envs.save_gif(env, tmp_path / "a/b/c.gif", jax.random.key(0), steps=2, size=32).exists()
    (tmp_path / "file").write_text("")
    played = []
    policy = lambda params, obs, key: played.append(obs) or jnp.int32(0)  # noqa: E731
    with pytest.raises(EnvError, match=r"save_gif: the folder of .*c.gif can't be made(.|\n)*Give a path in a folder"):
        rlfx.envs.save_gif(env, tmp_path / "file/b/c.gif", jax.random.key(0), policy=policy, steps=2, size=32)
    assert not played


def test_random_rollout():
    key = jax.random.key(0)
    fused = rlfx.envs.random_rollout("CartPole-v1", 50, 120)(key)
    plain = rlfx.envs.random_rollout("CartPole-v1", 50, 120, backend="vmap")(key)
    assert int(fused.episodes) == int(plain.episodes)
    np.testing.assert_allclose(np.array(fused), np.array(plain), rtol=1e-5)
    assert float(fused.mean_return) == pytest.approx(float(fused.mean_length))
    unsupported = rlfx.envs.random_rollout("gymnax/Asterix-MinAtar", 2, 5)(key)
    assert unsupported.mean_reward.shape == ()


@pytest.mark.parametrize(
    "name",
    [
        "CartPole-v1",
        "Pendulum-v1",
        "Acrobot-v1",
        "MountainCar-v0",
        "Catch-bsuite",
        "Breakout-MinAtar",
        "gymnax/CartPole-v1",
        "SyntheticImages-v0",
    ],
)
def test_render(name):
    env = rlfx.envs.make(name)
    state = env.reset(jax.random.key(0))
    image = rlfx.envs.render(env, state, size=48)
    assert (image.shape, image.dtype) == ((48, 48, 3), np.uint8)
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 2
    other = rlfx.envs.render(env, env.reset(jax.random.key(7)), size=48)
    if name in ("Pendulum-v1", "SyntheticImages-v0"):
        assert not np.array_equal(image, other)


def test_a_gif_of_a_policy_with_memory(tmp_path):
    """The pictures are of the states that the policy leads through."""
    from PIL import Image

    env, seen = rlfx.envs.make("CartPole-v1"), []
    seeing = lambda env, state, size: (seen.append(state.x), np.zeros((2, 2, 3), np.uint8))[1]  # noqa: E731
    alternate = lambda params, memory, obs, key: (memory % 2, memory + 1)  # noqa: E731
    with mock.patch("rlfx.envs.render.render", seeing):
        path = rlfx.envs.save_gif(env, tmp_path / "a.gif", jax.random.key(0), policy=alternate, memory=0, steps=6)
    with Image.open(path) as image:
        assert image.format == "GIF"
    key, keys = jax.random.split(jax.random.key(0))
    state = env.reset(key)
    for i, k in enumerate(jax.random.split(keys, 6)):
        state, _ = env.step(jax.random.split(k)[1], state, jnp.int32(i % 2))
        np.testing.assert_allclose(seen[i], state.x, rtol=1e-6)
    with pytest.raises(EnvError, match=r"save_gif: a policy with memory returned int"):
        rlfx.envs.save_gif(env, path, key, policy=lambda params, memory, obs, key: 0, memory=0)


def test_gif_and_png(tmp_path):
    from PIL import Image

    env = rlfx.envs.make("CartPole-v1")
    path = rlfx.envs.save_gif(
        env,
        tmp_path / "a.gif",
        jax.random.key(0),
        steps=5,
        size=40,
        policy=lambda params, obs, key: (obs[2] > params).astype(jnp.int32),
        params=0.0,
    )
    with Image.open(path) as image:
        assert image.n_frames == 5
    still = rlfx.envs.save_gif(env, tmp_path / "a.png", jax.random.key(0), steps=2, size=40)
    with Image.open(still) as image:
        assert image.size == (40, 40)


def test_a_picture_is_of_one_environment():
    env = rlfx.envs.make("CartPole-v1")
    states = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 3))
    with pytest.raises(EnvError, match=r"has shape \(4, 3\), that of one environment \(4,\)(.|\n)*lambda x: x\[0\], states"):
        rlfx.envs.render(env, states)
