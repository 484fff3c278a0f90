"""The dual policy: valid episodes, exact likelihoods, learning, transfer, checkpoints."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlfx.errors import PlacementError
from rlfx.place import baselines, checkpoint, hardware, methods, train, workloads
from rlfx.place.episode import log_probability, rollout
from rlfx.place.features import features
from rlfx.place.policy import DualPolicy, initialise
from rlfx.place.problem import build

POLICY = DualPolicy(hidden=8, rounds=1)
play = jax.jit(partial(rollout, POLICY), static_argnames=("batch", "select", "place"))
likelihood = jax.jit(partial(log_probability, POLICY))
choose = jax.jit(partial(POLICY.apply, method="devices"))


@pytest.fixture(scope="module")
def learner(chain):
    return train.start(jax.random.key(0), chain, POLICY)


def test_features_are_the_papers_and_scaled(chain):
    f = features(chain)
    assert f.nodes.shape == (chain.tasks, 5)
    assert float(f.nodes.min()) >= 0.0
    np.testing.assert_allclose(f.nodes.max(axis=0), 1.0, rtol=1e-6)
    np.testing.assert_allclose(f.exit_paths.sum(axis=1), 1.0, rtol=1e-5)
    entry = np.flatnonzero(~chain.adjacency.any(axis=0))[0]
    np.testing.assert_allclose(f.entry_paths[entry], np.eye(chain.tasks)[entry])


def test_episodes_visit_every_task_in_topological_order(chain, learner):
    episode = play(learner.params, features(chain), jax.random.key(1), 4, 0.5)
    assert np.all(np.sort(episode.task, axis=1) == np.arange(chain.tasks))
    order = np.asarray(episode.order())
    u, v = np.nonzero(chain.adjacency)
    assert np.all(order[:, u] < order[:, v])
    device = np.asarray(episode.assignment())
    assert len(np.unique(device)) == chain.devices
    np.testing.assert_array_equal(np.take_along_axis(device, np.asarray(episode.task), 1), episode.device)


def test_parallel_likelihood_equals_the_step_by_step_one(chain, learner):
    """Recompute one episode's log-probability the slow way: mask, softmax and load, one step after another."""
    f = features(chain)
    episode = play(learner.params, f, jax.random.key(1), 4, 0.0)
    encoding = POLICY.apply(learner.params, f, method="encode")
    pending, load = chain.adjacency.sum(axis=0).copy(), np.zeros((chain.devices, POLICY.hidden), np.float32)
    select = place = 0.0
    for step, (v, d) in enumerate(zip(episode.task[0], episode.device[0], strict=True)):
        logits = np.where(pending == 0, encoding.select, -np.inf)
        select += float(jax.nn.log_softmax(jnp.asarray(logits))[v])
        x = episode.state[0, step]
        row = choose(learner.params, encoding.task[v], jnp.asarray(load), x)
        place += float(jax.nn.log_softmax(row)[d])
        load[d] += np.asarray(encoding.placed[v])
        pending = pending - chain.adjacency[v]
        pending[v] = -1
    got = likelihood(learner.params, f, episode)
    np.testing.assert_allclose([got[0][0], got[1][0]], [select, place], rtol=1e-4)


def test_a_message_passing_per_step_is_the_same_mixture_seen_at_every_step(chain):
    """Appendix H.3: likelihoods of a batch equal those recomputed from one encoding a step, and differ from one."""
    policy = DualPolicy(hidden=8, rounds=1, per_step=True)
    f = features(chain)
    params = initialise(jax.random.key(0), f, policy)
    episode = jax.jit(partial(rollout, policy), static_argnames="batch")(params, f, jax.random.key(1), batch=2)
    pending = chain.adjacency.sum(axis=0).copy()
    device = np.asarray(episode.assignment()[0])
    encode = jax.jit(partial(policy.apply, method="encode"))
    place_row = jax.jit(partial(policy.apply, method="devices"))
    select = place = 0.0
    for step, (v, d) in enumerate(zip(episode.task[0], episode.device[0], strict=True)):
        placed, ready = pending < 0, pending == 0
        encoding = encode(params, f, jnp.asarray(np.stack([placed, ready], axis=1)))
        select += float(jax.nn.log_softmax(jnp.where(ready, encoding.select, -jnp.inf))[v])
        done = np.asarray(encoding.placed)  # in NumPy: each number of tasks would be a program
        load = np.stack([done[placed & (device == k)].sum(axis=0) for k in range(chain.devices)])
        place += float(jax.nn.log_softmax(place_row(params, encoding.task[v], load, episode.state[0, step]))[d])
        pending = pending - chain.adjacency[v]
        pending[v] = -1
    got = jax.jit(partial(log_probability, policy))(params, f, episode)
    np.testing.assert_allclose([got[0][0], got[1][0]], [select, place], rtol=1e-4)
    still = encode(params, f)
    assert float(jnp.abs(still.select - encoding.select).max()) > 1e-3
    learner = train.start(jax.random.key(2), chain, policy)
    learned, (mean, _) = train.learn(policy, learner, chain, jax.random.key(3), episodes=64)
    assert float(learned.cost) <= mean.min()


def test_device_features_of_the_earliest_rule_match_list_scheduling(chain, learner):
    """With unlimited links the episode's start times are those of a list schedule on the same choices."""
    f = features(chain)
    episode = play(learner.params, f, jax.random.key(2), 2, place="earliest", select="critical-path")
    start = np.asarray(episode.state[..., 4])
    chosen = np.take_along_axis(start, np.asarray(episode.device)[..., None], -1)
    np.testing.assert_allclose(chosen, 0.0, atol=1e-6)  # relative to the earliest


def test_an_untrained_network_places_where_a_task_starts_earliest(chain, learner):
    """PLC corrects a rule: before training a task waits longer than it needs to by a fraction of its own duration."""
    episode = play(learner.params, features(chain), jax.random.key(2), 4, 0.0)
    chosen = np.take_along_axis(np.asarray(episode.state), np.asarray(episode.device)[..., None, None], 2)[:, :, 0]
    waits = chosen[..., 4] / chosen[..., 5]
    assert np.quantile(waits, 0.99) < 1.0
    untrained = float(learner.params["params"]["greed"])
    blind = jax.tree.map(lambda x: x, learner.params)
    blind["params"]["greed"] = jnp.zeros(())
    other = play(blind, features(chain), jax.random.key(2), 4, 0.0)
    far = np.take_along_axis(np.asarray(other.state), np.asarray(other.device)[..., None, None], 2)[:, :, 0]
    assert untrained > 0.0
    assert np.quantile(far[..., 4] / far[..., 5], 0.5) > 1.0


def test_forced_episodes_repeat_the_choices(chain, learner):
    f = features(chain)
    episode = play(learner.params, f, jax.random.key(1), 4, 0.0)
    again = play(learner.params, f, jax.random.key(9), 4, 0.0, forced=(episode.task, episode.device))
    jax.tree.map(np.testing.assert_array_equal, again, episode)


def test_stage_one_raises_the_teachers_likelihood_and_stage_two_improves(chain, learner):
    teacher = [baselines.list_schedule(chain, np.random.default_rng(i)) for i in range(4)]
    f = features(chain)
    forced = play(learner.params, f, jax.random.key(0), 4, 0.0, forced=train.sequences(teacher))
    before = float(sum(likelihood(learner.params, f, forced)[:2]).mean())
    taught = train.imitate(POLICY, learner, chain, teacher, jax.random.key(1), steps=60)
    after = float(sum(likelihood(taught.params, f, forced)[:2]).mean())
    assert after > before + 10
    learned, (mean, best) = train.learn(
        POLICY, taught, chain, jax.random.key(2), episodes=3200, config=train.Training(learning_rate=1e-2)
    )
    assert mean[-10:].mean() < 0.97 * mean[:10].mean()
    assert np.all(np.diff(best) <= 0)
    found = baselines.Assignment(np.asarray(learned.device), np.asarray(learned.order))
    np.testing.assert_array_equal(baselines.evaluate(chain, [found])[0], learned.cost)


def test_stage_three_learns_from_measured_times(chain, learner):
    calls = []

    def run(assignment):
        calls.append(assignment)
        return float(baselines.evaluate(chain, [assignment])[0])

    config = train.Training(batch=4, learning_rate=1e-3)
    learned, times = train.learn_online(POLICY, learner, chain, run, jax.random.key(0), episodes=8, config=config)
    assert len(calls) == len(times) == 8
    assert float(learned.cost) == times.min()
    changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), learned.params, learner.params)
    assert any(jax.tree.leaves(changed))


def test_doppler_spends_its_budget_and_transfers(chain, tmp_path):
    first = methods.doppler(chain, jax.random.key(0), 512, policy=POLICY)
    assert first.cost <= methods.heuristic_starts(chain, jax.random.split(jax.random.key(0), 5)[0], 512)[1].min()
    checkpoint.save_policy(tmp_path / "policy", first.params)
    like = initialise(jax.random.key(5), features(chain), POLICY)
    restored = checkpoint.load_policy(tmp_path / "policy", like)
    jax.tree.map(np.testing.assert_array_equal, restored, first.params)
    graph = workloads.ffnn(64, 8, 32).graph()
    other = build(graph, hardware.v100_meshes())
    samples = train.sample(POLICY, restored, other, jax.random.key(1), 4)
    assert samples[0].device.shape == (other.tasks,)
    assert max(s.device.max() for s in samples) > 3  # eight devices, though trained on four


def test_missing_checkpoint_is_reported(chain, tmp_path, learner):
    with pytest.raises(PlacementError, match=r"(?s)There is no policy checkpoint at .*save_policy"):
        checkpoint.load_policy(tmp_path / "none", learner.params)
