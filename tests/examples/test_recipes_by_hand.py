"""What recipes compute at a timestep, or of a transition, against the same by hand: rollouts, errors, targets, goals, ranks."""

import dataclasses

import dqn_family
import es
import grpo
import her
import jax
import jax.numpy as jnp
import loops
import numpy as np
import ppo_continuous
import pytest
import sac
import tasks
import td3

import rlfx
import rlfx.envs
from rlfx.envs.spaces import Box

pytestmark = pytest.mark.usefixtures("lenient")
KEY = jax.random.key(0)


def test_ppos_rollout_by_hand():
    """Moments, scaled rewards and advantages of one rollout, against NumPy loops."""
    P, T, B = ppo_continuous, 6, 4
    recipe = ppo_continuous.make(length=T, envs=B, hidden=(8,))
    agent = recipe.init(KEY)
    params = {**agent.params, "log_std": agent.params["log_std"] - 1.0}
    state = agent.carry.state
    state = type(state)(state.theta, state.theta_dot, state.time + 197)  # an episode is cut at the third step
    first = agent.carry._replace(state=state)
    task, env = P.PENDULUM, P.PENDULUM.make()
    carry, (samples, rewards) = rlfx.unroll(P.make_act(task, env), length=T, batch=B)(params, first, KEY)

    rewards, ends = np.float64(rewards), np.arange(T) == 2
    discounted, seen = np.zeros(B), []
    scaled = np.zeros((T, B))
    for t in range(T):
        discounted = task.gamma * discounted + rewards[t]
        seen.append(discounted)
        scaled[t] = rewards[t] / np.std(seen)
        discounted = np.where(ends[t], 0.0, discounted)
    of_obs, of_returns = carry.scale.value
    np.testing.assert_allclose(of_returns.variance, np.var(seen), rtol=1e-4)
    assert of_obs.count == T * B

    value = jax.vmap(jax.vmap(lambda obs: P.critic(params, obs)))(samples.obs)
    # What followed within an episode is the next value; the deltas of the others hold the critic on unseen observations.
    target, advantage = np.float64(samples.target), np.float64(samples.advantage)
    np.testing.assert_allclose(target, advantage + value, rtol=1e-4, atol=1e-5)
    for t in (0, 1, 3, 4):
        delta = scaled[t] + task.gamma * np.float64(value[t + 1]) - value[t]
        np.testing.assert_allclose(advantage[t], delta + task.gamma * P.LAMBDA * advantage[t + 1], rtol=1e-3, atol=1e-4)
    last = jax.vmap(lambda s: P.critic(params, of_obs(env.observe(s))))(carry.state)
    # The value beyond the rollout is that of an observation that is counted, too, as at any timestep.
    assert np.abs(advantage[5] - (scaled[5] + task.gamma * np.float64(last) - value[5])).max() < 0.5


@dataclasses.dataclass(frozen=True)
class Rail(rlfx.envs.Environment):
    """A point in (-1, 1) moves by what the action says; beyond it is the end, and after seven steps it is cut."""

    name = "Rail"
    observation_space = Box(-1.0, 1.0, (1,))
    action_space = Box(-1.0, 1.0, (1,))

    def reset(self, key):
        return jax.random.uniform(key, (1,), minval=-0.1, maxval=0.1), jnp.int32(0)

    def observe(self, state):
        return state[0]

    def transition(self, key, state, action):
        place, time = state[0] + 0.5 * action, state[1] + 1
        out = jnp.abs(place[0]) > 1.0
        return (place, time), rlfx.envs.Step(place[0], out, ~out & (time >= 7), place)


def test_what_sac_remembers_is_what_happened(monkeypatch):
    """What follows is the episode's own last observation, not the next one's first; a cut is no end."""
    monkeypatch.setattr(sac, "SAMPLES", 2)
    monkeypatch.setattr(sac.Task, "make", lambda self: tasks.made(Rail()))
    task = dataclasses.replace(sac.PENDULUM, capacity=60, explore=60)
    recipe = sac.make(task, length=60, envs=3, hidden=(4,))
    agent, _ = jax.jit(lambda key: recipe.update(recipe.init(key), key))(KEY)
    x = jax.tree.map(np.asarray, agent.carry.memory.data)
    np.testing.assert_allclose(x.next_obs, x.obs + 0.5 * x.action, atol=1e-6)
    np.testing.assert_allclose(x.reward, task.scale * x.next_obs[..., 0], atol=1e-6)
    np.testing.assert_array_equal(x.terminated, np.abs(x.next_obs[..., 0]) > 1)

    for env in range(3):
        begins = [0]
        for t in range(59):
            ended, cut = bool(x.terminated[env, t]), t - begins[-1] == 6
            if ended or cut:
                begins.append(t + 1)
                assert np.abs(x.obs[env, t + 1]) <= 0.1
            else:
                np.testing.assert_array_equal(x.obs[env, t + 1], x.next_obs[env, t])
    assert 0 < x.terminated.sum() < 20


def rectified(layers, x):
    """What a layer gives has mean 0 and deviation 1 before the rectifier."""
    *hidden, (w_out, b_out) = layers
    for w, b in hidden:
        x = x @ w + b
        x = jnp.maximum((x - x.mean()) / jnp.sqrt(((x - x.mean()) ** 2).mean() + 1e-5), 0.0)
    return x @ w_out + b_out


@pytest.mark.parametrize(("network", "layers"), [(sac.PLAIN.network, sac.mlp), (sac.STEADY.network, rectified)])
def test_in_sac_each_part_learns_from_its_own_loss(network, layers):
    """Against the three losses written apart, with what is constant in each taken out of it; also where the task ended."""
    params, target, _ = sac.make(length=3, envs=2, updates=4, hidden=(8,)).init(KEY).carry.learner.value
    target = jax.tree.map(lambda x: 0.5 * x, target)
    params = params._replace(log_alpha=jnp.float32(-0.7))
    here, following = jax.random.split(KEY)

    def value(critics, obs, action):
        each = [jax.tree.map(lambda w: w[i], critics) for i in (0, 1)]
        return jnp.stack([layers(one, jnp.concatenate([obs, action]))[0] for one in each])

    def by_hand(x):
        policy = sac.actor(params.actor, x.next_obs)
        u = policy.sample(following)
        soft_value = value(target, x.next_obs, jnp.tanh(u)).min() - jnp.exp(-0.7) * policy.log_prob(u)
        aim = x.reward + 0.99 * (0.0 if bool(x.terminated) else 1.0) * soft_value

        def of_critics(critics):
            return ((value(critics, x.obs, x.action) - aim) ** 2).sum()

        def of_actor(actor):
            policy = sac.actor(actor, x.obs)
            u = policy.sample(here)
            return jnp.exp(-0.7) * policy.log_prob(u) - value(params.critics, x.obs, jnp.tanh(u)).min()

        policy = sac.actor(params.actor, x.obs)
        entropy = -policy.log_prob(policy.sample(here))
        return jax.grad(of_actor)(params.actor), jax.grad(of_critics)(params.critics), entropy - (-1.0)

    @jax.jit
    def both():
        obs, action, next_obs = jnp.array([0.3, -0.9, 2.0]), jnp.array([0.4]), jnp.array([0.5, -0.8, 1.0])
        ends = [sac.Transition(obs, action, jnp.float32(-0.3), np.bool_(end), next_obs) for end in (False, True)]
        return [(tuple(jax.grad(sac.sac_loss)(params, target, x, KEY, network)), by_hand(x)) for x in ends]

    for got, expected in both():
        jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-5), got, expected)


def numbers(tree, seed=0):
    """Random numbers like ``tree``: networks without symmetries."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), tree)


def steps_of(n, end=None, cut=None):
    rng = np.random.default_rng(1)
    flags = [np.arange(n) == k for k in (end, cut)]
    obs, following = rng.normal(size=(2, n, dqn_family.OBS)).astype(np.float32)
    return dqn_family.Transition(obs, np.int32([1, 0, 1])[:n], rng.normal(size=n).astype(np.float32), *flags, following)


@pytest.mark.parametrize(("end", "cut"), [(None, None), (1, None), (None, 1)])
def test_the_errors_of_the_family_by_hand(end, cut):
    """Every part: whose action follows, dueling values, n steps with ends, moved distributions (by loops over atoms)."""
    D, x, gamma = dqn_family, steps_of(3, end, cut), 0.99
    last = 2 if end is None and cut is None else 1
    reward = sum(gamma**k * float(x.reward[k]) for k in range(last + 1))
    discount = 0.0 if end is not None else gamma ** (last + 1)

    def both(parts):
        like = jax.eval_shape(lambda: parts.init(KEY, (6, 6), parts.estimate.atoms))
        return numbers(like, 1), numbers(like, 2)

    for parts, chooses in ((D.DUELING, 0), (D.DQN, 1)):
        parts = D.replace(parts, n=3)
        networks = both(parts)
        q = [parts.network(p, x.next_obs[last])[:, 0] for p in networks]
        following = q[1][int(jnp.argmax(q[chooses]))]
        expected = parts.network(networks[0], x.obs[0])[1, 0] - (reward + discount * following)
        np.testing.assert_allclose(D.td_loss(parts, *networks, x)[1], expected, rtol=1e-4, atol=1e-4)
    advantage = numbers(jax.eval_shape(lambda: D.init_dueling(KEY, (6, 6), 1)), 1)
    given = D.dueling(advantage, x.obs[0])[:, 0]
    h = jnp.tanh(D.mlp(advantage["body"], x.obs[0]))
    np.testing.assert_allclose(given.mean(), D.mlp(advantage["value"], h)[0], rtol=1e-4, atol=1e-5)

    estimate = D.Distribution(5, -1.0, 1.0)
    parts = D.replace(D.DISTRIBUTIONAL, estimate=estimate)
    networks = both(parts)
    means = [jax.nn.softmax(parts.network(p, x.next_obs[last])) @ estimate.support for p in networks]
    probabilities = jax.nn.softmax(parts.network(networks[1], x.next_obs[last])[int(jnp.argmax(means[0]))])
    aim = np.zeros(5)
    for probability, atom in zip(np.float64(probabilities), np.linspace(-1, 1, 5), strict=True):
        place = (np.clip(reward + discount * atom, -1, 1) + 1) / 0.5
        low = int(np.floor(place))
        aim[low] += probability * (1 - (place - low))
        if place > low:
            aim[low + 1] += probability * (place - low)
    expected = -(aim * np.log(jax.nn.softmax(parts.network(networks[0], x.obs[0])[1]))).sum()
    np.testing.assert_allclose(D.td_loss(parts, *networks, x)[0], expected, rtol=1e-4)


def test_td3_by_hand():
    """The smaller of two values of a noisy action; each part's gradient is that of its own loss; the actor waits."""
    noise = jnp.clip(0.2 * jax.random.normal(KEY, (1,)), -0.5, 0.5)
    recipe = td3.FAMILY["td3"](length=3, envs=2, updates=4, hidden=(8, 8))
    params = numbers(jax.eval_shape(lambda: recipe.init(KEY).carry.learner.value.params))
    target = numbers(params, 1)
    x = td3.Transition(jnp.ones(3), jnp.array([0.4]), jnp.float32(-0.3), np.bool_(False), jnp.array([0.5, -0.8, 1.0]))

    def value(critics, i, obs, action):
        return td3.mlp(jax.tree.map(lambda w: w[i], critics), jnp.concatenate([obs, action]))[0]

    action = jnp.clip(jnp.tanh(td3.mlp(target.actor, x.next_obs)) + noise, -1, 1)
    for end in (False, True):
        aim = x.reward + (0.0 if end else 0.99) * min(value(target.critics, i, x.next_obs, action) for i in (0, 1))

        def by_hand(critics):
            return sum((value(critics, i, x.obs, x.action) - aim) ** 2 for i in (0, 1))

        of_actor = lambda actor: -value(params.critics, 0, x.obs, jnp.tanh(td3.mlp(actor, x.obs)))  # noqa: E731
        got = jax.grad(lambda p: td3.loss(td3.TD3, p, target, x._replace(terminated=np.bool_(end)), KEY))(params)
        expected = jax.grad(of_actor)(params.actor), jax.grad(by_hand)(params.critics)
        jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-3, atol=1e-4), tuple(got), expected)


def test_the_group_by_hand():
    """GRPO's gradient, from what was written: the same numbers in a loop over groups, with attention over whole answers."""
    G, prompts, group, width = grpo, 2, 4, 4
    params = G.init_params(jax.random.key(1), width)
    reference = G.init_params(jax.random.key(2), width)
    program = rlfx.compile(G.grpo, length=G.LENGTH, batch=group)
    asked, keys = G.draw(KEY, prompts), jax.random.split(KEY, prompts)
    tokens = rlfx.unroll(lambda p, token, t: (G.grpo(p, token, t)[1], token), length=G.LENGTH, batch=group)
    total = jax.jit(
        lambda p: jax.vmap(lambda a, k: program((p, reference, a), a[0].repeat(group), k)[0])(asked, keys).mean()
    )
    written = jax.vmap(lambda a, k: tokens((params, reference, a), a[0].repeat(group), k))(asked, keys)
    last, before = written  # [prompts, group], [prompts, T, group]
    sequences = np.concatenate([np.asarray(before), np.asarray(last)[:, None]], 1).transpose(0, 2, 1)
    np.testing.assert_array_equal(sequences[:, :, : G.PROMPT], np.repeat(np.asarray(asked)[:, None], group, 1))
    assert (sequences[:, :, G.PROMPT] == G.EQUALS).all()

    def whole(params, sequence):
        """Log-probabilities of the tokens that follow, all at once."""
        x = params["token"][sequence] + params["position"]
        norm = lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)  # noqa: E731
        for layer in params["layers"]:
            q, k, v = G.mlp(layer["qkv"], norm(x)).reshape(G.LENGTH, 3, G.HEADS, -1).transpose(1, 2, 0, 3)
            scores = q @ k.transpose(0, 2, 1) / np.sqrt(width / G.HEADS)
            weights = jax.nn.softmax(jnp.where(np.tri(G.LENGTH, dtype=bool), scores, -jnp.inf))
            x = x + G.mlp(layer["out"], (weights @ v).transpose(1, 0, 2).reshape(G.LENGTH, width))
            x = x + G.mlp(layer["mlp"], norm(x))
        return jax.nn.log_softmax(G.mlp(params["head"], norm(x)))

    right = sequences[:, :, G.PROMPT + 1 :] == np.sort(asked)[:, None]
    reward = right.mean(-1)
    advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-4)

    def by_hand(params):
        losses = []
        for i in range(prompts):
            for j in range(group):
                sequence, answer = sequences[i, j, :-1], sequences[i, j, G.PROMPT + 1 :]
                picked = [whole(p, sequence)[G.PROMPT :][np.arange(G.PROMPT), answer] for p in (params, reference)]
                apart = jax.lax.stop_gradient(picked[1]) - picked[0]
                losses.append((-picked[0] * advantage[i, j] + G.BETA * (jnp.exp(apart) - apart - 1)).sum())
        return jnp.stack(losses).mean() / G.LENGTH

    got, expected = jax.value_and_grad(total)(params), jax.jit(jax.value_and_grad(by_hand))(params)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-3, atol=1e-5), got, expected)


def test_hindsight_gives_what_was_reached_in_the_same_episode():
    """Always a state that follows, up to the end of the episode; with a share of nothing the goal stays."""
    bits = jnp.arange(4.0)[:, None].repeat(10, 1)
    x = her.Transition(bits, bits * 0 - 1, jnp.arange(4), bits + 1, jnp.array([False, False, True, False]))
    goals = jax.vmap(lambda key: her.hindsight(x, key, 1.0).goal[0])(jax.random.split(KEY, 64))
    assert set(goals.tolist()) == {1.0, 2.0, 3.0}
    assert her.hindsight(x, KEY, 0.0).goal.tolist() == [-1.0] * 10
    assert her.hindsight(x, KEY, 1.0).bits.tolist() == [0.0] * 10


def test_ranks_are_centred():
    np.testing.assert_allclose(es.centred_ranks(jnp.array([3.0, 9.0, 1.0])), [0.0, 0.5, -0.5])


def test_the_surrogate_is_pessimistic():
    ratio, advantage = jnp.array([1.5, 0.5, 1.5, 0.5]), jnp.array([1.0, 1.0, -1.0, -1.0])
    got = loops.clipped_surrogate(jnp.log(ratio), advantage, 0.2)
    np.testing.assert_allclose(got, np.mean([1.2, 0.5, -1.5, -0.8]), rtol=1e-5)
