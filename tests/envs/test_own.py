"""Our environments: the dynamics of gymnasium and gymnax, the protocol's laws, and references for what they lack."""

import dataclasses

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import rlfx.envs
from rlfx.envs import spaces
from rlfx.envs.trigonometry import sin_cos, wrap_angle
from rlfx.errors import EnvError

OURS = [
    "CartPole-v1",
    "Pendulum-v1",
    "Acrobot-v1",
    "MountainCar-v0",
    "Catch-bsuite",
    "Breakout-MinAtar",
]
ALL = [*OURS, "MountainCarContinuous-v0", "SyntheticImages-v0", "CartPole-parametric"]


def to_gymnax(name, state, env):
    """The gymnax state that holds the same values as ours."""
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    like = env.reset(jax.random.key(0))[1]
    extra = {}
    if name == "Pendulum-v1":
        extra = {"last_u": jnp.float32(0)}
    if name == "Catch-bsuite":
        extra = {"paddle_y": jnp.int32(env.rows - 1), "prev_done": jnp.bool_(False)}
    if name == "Breakout-MinAtar":
        bits = (fields.pop("bricks") >> jnp.arange(30, dtype=jnp.uint32)) & 1
        wall = jnp.zeros((10, 10), jnp.float32).at[1:4].set(bits.reshape(3, 10).astype(jnp.float32))
        extra = {"brick_map": wall, "terminal": jnp.bool_(False)}
    return type(like)(**fields, **extra)


@pytest.mark.parametrize("name", OURS)
def test_dynamics_equal_gymnax(name):
    """Along 2,000 random steps with auto-reset: the same state and action give the same transition."""
    ours, bare = rlfx.envs.make(name), rlfx.envs.make(name, auto_reset=False)

    def body(state, key):
        action = spaces.sample(ours.action_space, jax.random.fold_in(key, 1))
        after, step = bare.step(key, state, action)
        following, _ = ours.step(key, state, action)
        return following, (state, action, after, step)

    state = ours.reset(jax.random.key(0))
    _, (states, actions, after, steps) = jax.lax.scan(body, state, jax.random.split(jax.random.key(7), 2000))
    # Some of gymnax's environments do not run with 64-bit types.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), jax.enable_x64(False):
        env, params = gymnax.make(name)

        def theirs(state, action):
            obs, after, reward, terminated, _ = env.step_env(
                jax.random.key(0), to_gymnax(name, state, env), action, params
            )
            return obs, after, reward, terminated, env.is_truncated(after, params)

        obs, their_after, reward, terminated, truncated = jax.vmap(theirs)(states, actions)
        expected = jax.vmap(lambda s: to_gymnax(name, s, env))(after)
    tolerance = {"rtol": 1e-6, "atol": 2e-6 if name == "Acrobot-v1" else 1e-6}
    np.testing.assert_allclose(steps.final_obs, obs, **tolerance)
    np.testing.assert_allclose(steps.reward, np.asarray(reward).reshape(-1), **tolerance)
    np.testing.assert_array_equal(steps.terminated, terminated)
    np.testing.assert_array_equal(steps.truncated, truncated)
    assert bool(jnp.any(steps.terminated | steps.truncated)), "the rollout must cross the end of an episode"
    for field in dataclasses.fields(expected):
        if field.name not in ("last_u", "terminal", "prev_done"):
            a, b = np.asarray(getattr(expected, field.name)), np.asarray(getattr(their_after, field.name))
            if "angle" in field.name:
                a, b = np.cos(a), np.cos(b)  # pi and -pi are the same angle
            np.testing.assert_allclose(a, b, **tolerance, err_msg=field.name)


@pytest.mark.parametrize("name", ALL)
def test_carry_is_stable(name):
    env = rlfx.envs.make(name)
    state = jax.eval_shape(env.reset, jax.random.key(0))
    action = jax.eval_shape(lambda k: spaces.sample(env.action_space, k), jax.random.key(0))
    after, step = jax.eval_shape(env.step, jax.random.key(0), state, action)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.weak_type), state
    )
    assert [(x.shape, x.dtype) for x in (step.reward, step.terminated, step.truncated)] == [
        ((), jnp.float32),
        ((), bool),
        ((), bool),
    ]
    obs = jax.eval_shape(env.observe, state)
    assert (obs.shape, obs.dtype) == (env.observation_space.shape, env.observation_space.dtype)
    assert (step.final_obs.shape, step.final_obs.dtype) == (obs.shape, obs.dtype)


def test_cartpole_resets_are_gymnax_resets():
    """Same key, same trajectory as gymnax, through several episodes."""
    ours, theirs = rlfx.envs.make("CartPole-v1"), rlfx.envs.make("gymnax/CartPole-v1")

    def rollout(env):
        def body(state, key):
            state, step = env.step(key, state, jnp.int32(1))
            return state, (env.observe(state), step)

        return jax.lax.scan(body, env.reset(jax.random.key(3)), jax.random.split(jax.random.key(4), 60))[1]

    (a, step_a), (b, step_b) = rollout(ours), rollout(theirs)
    np.testing.assert_allclose(a, b, atol=1e-5)
    np.testing.assert_array_equal(step_a.terminated, step_b.terminated)
    assert int(step_a.terminated.sum()) >= 4


# Where to begin a step: beyond the walls, the goals and the fallen poles, too. An edge is begun at exactly, half of the time.
RANGES = {
    "CartPole-v1": [(-3, 3), (-5, 5), (-0.3, 0.3), (-4, 4)],
    "Pendulum-v1": [(-9, 9), (-8, 8)],
    "Acrobot-v1": [(-3.14, 3.14), (-3.14, 3.14), (-12.5, 12.5), (-28, 28)],
    "MountainCar-v0": [(-1.2, 0.6), (-0.07, 0.07)],
    "MountainCarContinuous-v0": [(-1.2, 0.6), (-0.07, 0.07)],
}


def states_of(name, env, rng, count):
    low, high = np.array(RANGES[name]).T
    values = rng.uniform(low, high, (count, len(low)))
    if "Mountain" in name:
        values[::2, 0] = rng.choice([-1.2, -1.19, 0.42, 0.44, 0.49, 0.6], len(values[::2]))
    values = values.astype(np.float32)
    time = np.zeros(count, np.int32)
    return values, type(env.reset(jax.random.key(0)))(*map(jnp.asarray, (*values.T, time)))


@pytest.mark.parametrize("name", RANGES)
def test_steps_equal_gymnasium(name):
    """500 states, walls and ends among them: what one step gives is what gymnasium's own step gives."""
    gymnasium = pytest.importorskip("gymnasium")
    reference, env, rng = (
        gymnasium.make(name).unwrapped,
        rlfx.envs.make(name, auto_reset=False),
        np.random.default_rng(0),
    )
    reference.reset(seed=0)
    values, states = states_of(name, env, rng, 500)
    space = env.action_space
    discrete = isinstance(space, spaces.Discrete)
    actions = rng.integers(0, space.n, 500) if discrete else rng.uniform(space.low, space.high, (500, 1))
    actions = actions.astype(space.dtype)
    after, step = jax.jit(jax.vmap(lambda s, a: env.step(jax.random.key(0), s, a)))(states, actions)
    held, ends = 0, 0
    for i, action in enumerate(actions):
        reference.state = np.array(values[i], np.float64)
        reference.steps_beyond_terminated = None  # CartPole's
        obs, reward, terminated, truncated, _ = reference.step(int(action) if discrete else action)
        np.testing.assert_allclose(step.final_obs[i], obs, atol=3e-5, rtol=1e-5, err_msg=str(values[i]))
        np.testing.assert_allclose(step.reward[i], reward, atol=1e-5, rtol=1e-5)
        assert (bool(step.terminated[i]), truncated) == (terminated, False), values[i]
        ends += terminated
        held += "Mountain" in name and obs[1] == 0
    assert ends > 10 or name == "Pendulum-v1"
    assert held > 10 or "Mountain" not in name  # at the left wall
    assert after.time.tolist() == [1] * 500


@pytest.mark.parametrize("name", RANGES)
def test_resets_spaces_and_limits_are_gymnasiums(name):
    gymnasium = pytest.importorskip("gymnasium")
    reference, env = gymnasium.make(name), rlfx.envs.make(name, auto_reset=False, differentiable=True)
    for ours, theirs in (
        (env.observation_space, reference.observation_space),
        (env.action_space, reference.action_space),
    ):
        assert ours.shape == theirs.shape
        if isinstance(ours, spaces.Discrete):
            assert (ours.n, theirs.start) == (theirs.n, 0)
        else:
            np.testing.assert_allclose(ours.low, theirs.low, rtol=1e-6)
            np.testing.assert_allclose(ours.high, theirs.high, rtol=1e-6)
    assert env.max_steps_in_episode == gymnasium.spec(name).max_episode_steps
    state = env.reset(jax.random.key(0))
    action = jnp.zeros(env.action_space.shape, env.action_space.dtype)
    for time, cut in ((env.max_steps_in_episode - 2, False), (env.max_steps_in_episode - 1, True)):
        step = env.step(jax.random.key(1), dataclasses.replace(state, time=jnp.int32(time)), action)[1]
        assert (bool(step.truncated), bool(step.terminated)) == (cut, False)
    first = np.asarray(
        jax.jit(jax.vmap(lambda k: env.observe(env.reset(k))))(jax.random.split(jax.random.key(2), 2000))
    )
    reference.reset(seed=0)
    theirs = np.stack([reference.reset()[0] for _ in range(2000)])
    for ours, expected in zip(first.T, theirs.T, strict=True):
        assert np.ptp(expected) == 0 or stats.ks_2samp(ours, expected).pvalue > 1e-4
        assert np.ptp(expected) > 0 or np.all(ours == expected)


def test_parametric_cartpole():
    base, one = rlfx.envs.make("CartPole-v1"), rlfx.envs.make("CartPole-parametric")
    key, action = jax.random.key(0), jnp.int32(1)
    a, b = base.step(key, base.reset(key), action)[1], one.step(key, one.reset(key), action)[1]
    np.testing.assert_array_equal(a.final_obs, b.final_obs)
    finer = rlfx.envs.make("CartPole-parametric", compute_factor=16, state_factor=4)
    state, c = finer.step(key, finer.reset(key), action)
    np.testing.assert_allclose(c.final_obs, a.final_obs, atol=5e-3)  # Euler steps sixteen times as fine
    assert state.ballast.shape == (12,)
    assert int(state.cartpole.time) == 1
    with pytest.raises(EnvError, match="ParametricCartPole: state_factor must be a positive integer, got 0"):
        rlfx.envs.make("CartPole-parametric", state_factor=0)


def test_synthetic_images_reward_the_band_that_is_bright():
    env = rlfx.envs.make("SyntheticImages-v0", obs_shape=(8, 6, 2), num_actions=4, episode_length=3)
    state = env.reset(jax.random.key(0))
    seen = set()
    for t in range(30):
        image = np.asarray(env.observe(state))
        band = int(np.argmax(image.reshape(4, -1).mean(axis=1)))
        seen.add(band)
        assert image.reshape(4, -1)[band].min() >= 128 > np.delete(image.reshape(4, -1), band, 0).max()
        state, step = env.step(jax.random.key(t), state, jnp.int32(band))
        assert float(step.reward) == 1.0
        assert bool(step.truncated) == (t % 3 == 2)
    assert len(seen) == 4


def test_sin_cos():
    x = np.linspace(-1e4, 1e4, 400_001, dtype=np.float32)
    s, c = sin_cos(jnp.asarray(x))
    assert np.abs(np.asarray(s, np.float64) - np.sin(x.astype(np.float64))).max() < 3e-7
    assert np.abs(np.asarray(c, np.float64) - np.cos(x.astype(np.float64))).max() < 3e-7
    x = x / 100
    wrapped = np.asarray(wrap_angle(jnp.asarray(x)))
    assert (np.abs(wrapped) <= np.pi + 1e-5).all()
    np.testing.assert_allclose(np.sin(wrapped.astype(np.float64)), np.sin(x.astype(np.float64)), atol=1e-5)


def test_these_are_all_of_gymnasiums_names_that_are_served():
    gymnasium = pytest.importorskip("gymnasium")
    assert {name for name in rlfx.envs.list_envs() if name in gymnasium.registry} == set(RANGES)


NOOP = jnp.int32(1)  # an array that exists before anything is traced


def test_an_action_may_be_an_array_that_a_traced_function_closes_over():
    """Whether a known action is inside is asked outside of the trace (it was a question about a traced value)."""
    env, key = rlfx.envs.make("CartPole-v1"), jax.random.key(0)
    state = env.reset(key)
    expected, _ = env.step(key, state, NOOP)
    assert jax.jit(lambda s: env.step(key, s, NOOP))(state)[0] == expected
    scanned, _ = jax.lax.scan(lambda s, _: (env.step(key, s, NOOP)[0], None), state, length=1)
    assert scanned == expected
    assert rlfx.envs.evaluate(env, lambda params, obs, key: NOOP, None, key, episodes=2).returns.max() < 12
    rewards = rlfx.unroll(lambda _, s, t: env.step(t.key, s, NOOP), length=3)(None, state, key)[1].reward
    assert rewards.tolist() == [1.0] * 3
    bad = NOOP + 6
    with pytest.raises(EnvError, match="action 7 is outside Discrete"):
        jax.jit(lambda s: env.step(key, s, bad))(state)


@dataclasses.dataclass(frozen=True)
class Switches(rlfx.envs.Environment):
    """Several choices of one size."""

    name = "switches"
    observation_space = spaces.Box(0.0, 9.0, (2,))
    action_space = spaces.Discrete(3, shape=(2,))

    def reset(self, key):
        return jnp.zeros(2, jnp.float32)

    def observe(self, state):
        return state

    def transition(self, key, state, action):
        after = jnp.minimum(state + action.astype(jnp.float32), 9.0)
        return after, rlfx.envs.Step(jnp.sum(after), after[0] >= 9.0, jnp.bool_(False), after)


def test_several_choices_of_one_size():
    env, key = Switches(), jax.random.key(0)
    rlfx.envs.check(env)
    _, step = env.step(key, env.reset(key), jnp.array([1, 2]))
    assert float(step.reward) == 3.0
    assert spaces.size(env.action_space) == 6
    assert not bool(env.action_space.contains(jnp.array([1, 3])))
    with pytest.raises(EnvError, match=r"action \[1 3\] is outside"):
        env.step(key, env.reset(key), jnp.array([1, 3]))


@pytest.mark.parametrize(("n", "dtype"), [(256, jnp.uint8), (128, jnp.int8), (2**16, jnp.uint16)])
def test_a_discrete_space_may_fill_its_dtype(n, dtype):
    space = spaces.Discrete(n, dtype)
    assert all(bool(space.contains(dtype(i))) for i in (0, 5, n - 1))
    assert bool(jax.vmap(space.contains)(jax.vmap(space.sample)(jax.random.split(jax.random.key(0), 99))).all())
    with pytest.raises(EnvError, match=f"holds no number above {n - 1}"):
        spaces.Discrete(n + 1, dtype)
