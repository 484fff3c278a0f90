"""brax and gymnasium under the protocol: batched, in scans, with typed keys, automatic resets and time limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx.envs
from rlfx.errors import EnvError


def rollout(env, n, k, action, key=None):
    key = jax.random.key(0) if key is None else key
    states = jax.vmap(env.reset)(jax.random.split(key, n))
    first = jax.vmap(env.observe)(states)

    def body(states, key):
        before = jax.vmap(env.observe)(states)
        states, step = jax.vmap(env.step)(jax.random.split(key, n), states, action(before))
        return states, (jax.vmap(env.observe)(states), step)

    return first, jax.jit(lambda s, ks: jax.lax.scan(body, s, ks))(states, jax.random.split(key, k))[1]


# -- gymnasium -------------------------------------------------------------------------------------------------------


def test_gymnasium_equals_gymnasium():
    """Two copies, four episodes: the trajectories are those of gymnasium itself, with true final observations."""
    import gymnasium

    env = rlfx.envs.make("gymnasium/CartPole-v1")
    key = jax.random.key(0)
    first, (obs, step) = rollout(env, 2, 60, lambda o: jnp.ones(2, jnp.int32), key)
    seeds = jax.vmap(lambda k: jax.random.bits(k, dtype=jnp.uint32))(jax.random.split(key, 2))
    for i in range(2):
        reference = gymnasium.make("CartPole-v1")
        expected, _ = reference.reset(seed=int(seeds[i]))
        np.testing.assert_allclose(first[i], expected, atol=1e-6)
        for t in range(60):
            expected, reward, terminated, truncated, _ = reference.step(1)
            np.testing.assert_allclose(step.final_obs[t, i], expected, atol=1e-6)
            assert (float(step.reward[t, i]), bool(step.terminated[t, i]), bool(step.truncated[t, i])) == (
                reward,
                terminated,
                truncated,
            )
            if terminated or truncated:
                expected, _ = reference.reset()
            np.testing.assert_allclose(obs[t, i], expected, atol=1e-6)
    assert int(step.terminated.sum()) >= 10


def test_gymnasium_is_one_call_for_a_batch(monkeypatch):
    env = rlfx.envs.make("gymnasium/Pendulum-v1", auto_reset=False).env
    sizes = []
    original = env._host_step
    monkeypatch.setattr(env, "_host_step", original)
    env._step = rlfx.envs.gymnasium._batched_callback(
        lambda *xs: (sizes.append(len(xs[0])), original(*xs))[1],
        (
            jax.ShapeDtypeStruct((3,), jnp.float32),
            jax.ShapeDtypeStruct((3,), jnp.float32),
            jax.ShapeDtypeStruct((), jnp.float32),
            jax.ShapeDtypeStruct((), bool),
            jax.ShapeDtypeStruct((), bool),
            {},
        ),
    )
    rollout(env, 5, 4, lambda o: jnp.zeros((5, 1)))
    assert sizes == [5, 5, 5, 5]


def test_gymnasium_refuses_to_go_back():
    env = rlfx.envs.make("gymnasium/CartPole-v1")
    state = env.reset(jax.random.key(0))
    env.step(jax.random.key(1), state, jnp.int32(0))
    with pytest.raises(Exception, match=r"(?s)or of an earlier reset.*evaluate on another object of `make`"):
        jax.block_until_ready(env.step(jax.random.key(1), state, jnp.int32(0)))


def _lengths_by_gymnasium(keys, act, limit=200):
    """The lengths of episodes that gymnasium itself plays."""
    import gymnasium

    env, lengths = gymnasium.make("CartPole-v1"), []
    for key in keys:
        obs, _ = env.reset(seed=int(jax.random.bits(key, dtype=jnp.uint32)))
        lengths.append(0)
        ended = False
        while not ended and lengths[-1] < limit:
            obs, _, terminated, truncated, _ = env.step(int(act(obs)))
            ended = terminated or truncated
            lengths[-1] += 1
    return lengths


@pytest.mark.filterwarnings("error:.*calling.*step:UserWarning")  # what gymnasium warns of an episode that has ended
@pytest.mark.parametrize("auto_reset", [True, False])
def test_gymnasium_is_evaluated_by_whole_episodes(auto_reset):
    env, key = rlfx.envs.make("gymnasium/CartPole-v1", auto_reset=auto_reset), jax.random.key(0)
    result = rlfx.envs.evaluate(env, lambda _, obs, key: jnp.int32(obs[2] > 0), None, key, 6)
    lengths = _lengths_by_gymnasium(jax.random.split(jax.random.split(key)[0], 6), lambda obs: obs[2] > 0)
    assert result.lengths.tolist() == lengths
    assert len(set(lengths)) > 2
    assert bool(result.ended.all())


@pytest.mark.filterwarnings("error:.*calling.*step:UserWarning")
def test_gymnasium_ends_episodes_apart_under_until():
    env, keys = rlfx.envs.make("gymnasium/CartPole-v1", auto_reset=False), jax.random.split(jax.random.key(0), 4)

    def act(params, carry, t):
        after, step = env.step(t.key_for("env"), carry["state"], jnp.int32(env.observe(carry["state"])[2] > 0))
        return {"state": after, "ended": step.terminated | step.truncated}, step.reward

    run = rlfx.unroll(act, length=100, batch=4, until=lambda carry: carry["ended"])
    carry = {"state": jax.vmap(env.reset)(keys), "ended": jnp.zeros(4, bool)}
    _, reward, lengths = run(None, carry, jax.random.key(1))
    assert lengths.tolist() == _lengths_by_gymnasium(keys, lambda obs: obs[2] > 0)
    np.testing.assert_array_equal(reward.sum(0), lengths)


def test_gymnasium_goes_on_after_the_end_with_no_reward():
    env = rlfx.envs.make("gymnasium/CartPole-v1", auto_reset=False)
    _, (obs, step) = rollout(env, 1, 14, lambda o: jnp.ones(1, jnp.int32))
    end = int(step.terminated.argmax())
    assert 5 < end < 13
    assert bool(step.terminated[end:].all())
    np.testing.assert_array_equal(step.reward[:, 0], np.arange(14) <= end)
    np.testing.assert_array_equal(obs[end:], np.broadcast_to(obs[end], obs[end:].shape))


def test_gymnasium_nested_vmap():
    env = rlfx.envs.make("gymnasium/CartPole-v1")
    keys = jax.random.split(jax.random.key(0), (2, 3))
    states = jax.vmap(jax.vmap(env.reset))(keys)
    states, step = jax.vmap(jax.vmap(env.step))(keys, states, jnp.zeros((2, 3), jnp.int32))
    assert step.final_obs.shape == (2, 3, 4)
    np.testing.assert_array_equal(states.slot, np.arange(6).reshape(2, 3))


@pytest.fixture
def choosing():
    """A gymnasium environment with an action space of the test's; its observations are the actions that it was given."""
    import gymnasium

    class Choosing(gymnasium.Env):
        def __init__(self, space):
            self.action_space, self.observation_space = space, gymnasium.spaces.MultiDiscrete([4, 4])

        def reset(self, *, seed=None, options=None):
            return np.zeros(2, np.int64), {}

        def step(self, action):
            assert self.action_space.contains(action)
            return np.broadcast_to(np.asarray(action), 2).astype(np.int64), float(np.sum(action)), False, False, {}

    gymnasium.register("Choosing-v0", lambda space: Choosing(space), disable_env_checker=True)
    yield lambda space: rlfx.envs.make("gymnasium/Choosing-v0", space=space)
    del gymnasium.registry["Choosing-v0"]


def test_gymnasium_choices_of_one_size_are_an_array_of_them(choosing):
    import gymnasium.spaces as g

    env = choosing(g.MultiDiscrete([3, 3]))
    assert env.action_space == rlfx.envs.spaces.Discrete(3, shape=(2,))
    assert env.observation_space == rlfx.envs.spaces.Discrete(4, shape=(2,))
    actions = jnp.array([[0, 2], [1, 1], [2, 0]])
    _, (obs, step) = rollout(env, 3, 2, lambda o: actions)
    np.testing.assert_array_equal(obs, jnp.stack([actions, actions]))
    np.testing.assert_array_equal(step.reward, np.full((2, 3), 2.0))
    with pytest.raises(EnvError, match=r"(?s)MultiDiscrete\(\[2 3\]\) has no counterpart here: .*sizes.*a Tuple or a Dict"):
        choosing(g.MultiDiscrete([2, 3]))
    with pytest.raises(EnvError, match=r"(?s)Discrete\(3, start=1\) begins at 1, and a Discrete begins at 0.*with start=0"):
        choosing(g.Discrete(3, start=1))
    with pytest.raises(EnvError, match=r"(?s)Text.* has no counterpart here"):
        choosing(g.Text(3))


@pytest.fixture
def counting():
    """A gymnasium environment of three steps that says much: it may be told what its info has at the n-th step."""
    import gymnasium

    class Counting(gymnasium.Env):
        observation_space, action_space = gymnasium.spaces.Box(-9, 9, (1,)), gymnasium.spaces.Discrete(2)

        def __init__(self, says):
            self.says = says

        def reset(self, *, seed=None, options=None):
            self.n = 0
            return np.zeros(1, np.float32), {"n": -1}

        def step(self, action):
            self.n += 1
            return np.full(1, self.n, np.float32), 1.0, self.n == 3, False, self.says(self.n)

    gymnasium.register("Counting-v0", lambda says: Counting(says), disable_env_checker=True)
    yield lambda says, **more: rlfx.envs.make("gymnasium/Counting-v0", says=says, **more)
    del gymnasium.registry["Counting-v0"]


def test_gymnasium_keeps_the_numbers_of_info(counting):
    """Of the step, not of the reset behind it; what is no number stays on the host."""

    def says(n):
        return {
            "n": n,
            "half": n / 2,
            "of": {"pair": np.array([n, -n]), "text": "x"},
            "odd": n % 2 == 1,
            "objects": [n],
        }

    env = counting(says)
    _, (obs, step) = rollout(env, 2, 7, lambda o: jnp.zeros(2, jnp.int32))
    n = np.array([1, 2, 3, 1, 2, 3, 1])[:, None].repeat(2, 1)
    assert set(step.info) == {"n", "half", "of", "odd"}
    assert set(step.info["of"]) == {"pair"}
    np.testing.assert_array_equal(step.info["n"], n)
    np.testing.assert_array_equal(step.info["half"], n / 2)
    np.testing.assert_array_equal(step.info["of"]["pair"], np.stack([n, -n], -1))
    np.testing.assert_array_equal(step.info["odd"], n % 2 == 1)
    dtypes = jax.tree.map(lambda x: x.dtype.name, step.info)
    assert dtypes == {"n": "int32", "half": "float32", "of": {"pair": "int32"}, "odd": "bool"}
    np.testing.assert_array_equal(obs[:, 0, 0], n[:, 0] % 3)  # the reset of the third step is seen, its info is not

    _, (_, step) = rollout(counting(says, auto_reset=False), 1, 5, lambda o: jnp.zeros(1, jnp.int32))
    np.testing.assert_array_equal(step.info["n"][:, 0], [1, 2, 3, 3, 3])  # that of the end stays


def test_gymnasium_info_that_comes_now_and_then_is_declared(counting):
    says = lambda n: {"lap": True, "n": n} if n == 3 else {}  # noqa: E731
    act = lambda o: jnp.zeros(2, jnp.int32)  # noqa: E731
    assert rollout(counting(says), 2, 4, act)[1][1].info == {}
    declared = counting(says, info={"lap": False, "n": -1.0})
    _, (_, step) = rollout(declared, 2, 7, act)
    np.testing.assert_array_equal(step.info["lap"][:, 0], [0, 0, 1, 0, 0, 1, 0])
    np.testing.assert_array_equal(step.info["n"][:, 1], np.float32([-1, -1, 3, -1, -1, 3, -1]))
    assert counting(lambda n: 1 / 0, info={}) is not None  # no step is tried


@pytest.mark.parametrize(("says", "message"), [
    (lambda n: {"at": {"x": 1}} if n == 1 else {}, r"a step has no info\['at'\]\['x'\], and the first one had(.|\n)*info=\{\}"),
    (lambda n: {"x": 1 if n == 1 else 0.5}, r"info\['x'\] of a step is float64\[\], and int32\[\] was expected"),
    (lambda n: {"x": np.zeros(n)}, r"info\['x'\] of a step is float64\[2\], and float32\[1\] was expected"),
])  # fmt: skip
def test_gymnasium_info_that_changes_is_refused(counting, says, message):
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(rollout(counting(says), 1, 2, lambda o: jnp.zeros(1, jnp.int32)))


@pytest.mark.parametrize("info", [3, {"lap": "no"}, {3: 1}, {"lap": {"at": None}}])
def test_gymnasium_info_is_declared_by_numbers(info):
    with pytest.raises(EnvError, match=r"gymnasium/CartPole-v1: info must be a dict, by name, of numbers(.|\n)*lives"):
        rlfx.envs.make("gymnasium/CartPole-v1", info=info)


def test_mujoco_if_installed():
    pytest.importorskip("mujoco")
    pytest.importorskip("imageio")  # gymnasium's MuJoCo environments import it
    env = rlfx.envs.make("gymnasium/InvertedPendulum-v5")
    _, (obs, step) = rollout(env, 2, 40, lambda o: jnp.full((2, 1), 1.0))
    assert obs.shape == (40, 2, 4)
    assert bool(step.terminated.any())


# -- brax ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fast", "inverted_pendulum"])
def test_brax(name):
    """Typed keys under scan and vmap, a stable carry, truncation at the time limit with the true final observation."""
    options = {} if name == "fast" else {"backend": "spring"}
    env = rlfx.envs.make(f"brax/{name}", episode_length=5, **options)
    size = env.action_space.shape[0]
    _, (obs, step) = rollout(env, 3, 12, lambda o: jnp.zeros((3, size)))
    assert step.truncated.dtype == bool
    assert bool(step.truncated[4].any() | step.terminated[:5].any())
    ended = np.asarray(step.terminated | step.truncated)
    at = np.argwhere(ended)
    assert len(at) >= 3
    if name != "fast":
        for t, i in at:
            assert np.abs(obs[t, i] - step.final_obs[t, i]).max() > 1e-6  # a new episode began
        running = ~ended
        np.testing.assert_allclose(np.asarray(obs)[running], np.asarray(step.final_obs)[running])


@pytest.mark.slow
def test_brax_gradients_through_physics():
    env = rlfx.envs.make("brax/reacher", auto_reset=False, differentiable=True, backend="spring")
    state = env.reset(jax.random.key(0))

    def loss(action):
        return env.step(jax.random.key(1), state, action)[1].reward

    gradient = jax.grad(loss)(jnp.array([0.1, -0.2]))
    assert float(jnp.abs(gradient).max()) > 0
    stopped = rlfx.envs.make("brax/reacher", auto_reset=False, backend="spring")
    zero = jax.grad(lambda a: stopped.step(jax.random.key(1), state, a)[1].reward)(jnp.array([0.1, -0.2]))
    np.testing.assert_array_equal(zero, 0)


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "message"), [
    ("gymnasium/CartPol-v1", "CartPol"),
    ("brax/aint", r"brax has no environment 'aint'(.|\n)*Did you mean 'ant'"),
    ("gymnax/CartPol-v1", r"gymnax has no environment 'CartPol-v1'(.|\n)*Did you mean 'CartPole-v1'"),
    (3, "make takes the name of an environment, not int"),
    ("Breakout", "Did you mean 'Breakout-MinAtar'"),
    ("zzzzzzzzzzzzqqqqqqqq", "rlfx.envs.list_envs"),
])  # fmt: skip
def test_unknown_environment(name, message):
    with pytest.raises(EnvError, match=message):
        rlfx.envs.make(name)


@pytest.mark.parametrize(
    ("name", "extra"), [("gymnax/CartPole-v1", "envs"), ("brax/ant", "envs"), ("gymnasium/CartPole-v1", "gymnasium")]
)
def test_missing_extra(name, extra, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    family = name.split("/")[0]
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == family else real(n, *a))
    with pytest.raises(EnvError, match=rf"not installed.\n  Fix: pip install 'rlfx\[{extra}\]'"):
        rlfx.envs.make(name)


def test_names_of_a_missing_package(monkeypatch):
    from rlfx.envs import gymnax

    monkeypatch.setattr(gymnax, "available", lambda: ())
    with pytest.raises(EnvError, match=r"Those of gymnax are not installed: pip install 'rlfx\[envs\]'"):
        rlfx.envs.make("FourRooms-misc")


def test_unknown_parameters_of_our_own():
    with pytest.raises(EnvError, match=r"CartPole-v1 has no parameter 'mass'(.|\n)*masspole"):
        rlfx.envs.make("CartPole-v1", mass=3.0)


def test_unknown_backend_of_brax():
    pytest.importorskip("brax")
    with pytest.raises(EnvError, match=r"brax/fast: backend must be .*\"spring\".* or None, got 'sprng'"):
        rlfx.envs.make("brax/fast", backend="sprng")


def test_unknown_parameter():
    with pytest.raises(EnvError, match=r"Its parameters are .*masspole"):
        rlfx.envs.make("gymnax/CartPole-v1", mass_of_pole=3.0)
