"""PEARL's runtime: what its parts compute together is what they compute one after another; every failure ends the run."""

import _thread
import itertools
import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlfx.errors import PartError, PlacementError, TrainingError
from rlfx.place import pearl
from rlfx.place import replay as rp
from rlfx.place.compose import Composition, Pools
from rlfx.place.pearl import primitives as do
from rlfx.place.pearl.crew import Channel, Crew, Part, Stopped, Versions
from rlfx.place.pearl.hosts import Process
from rlfx.training import latest, save
from tests.place import pearl_systems
from tests.place.pearl_systems import deep, system

KEY = jax.random.key(1)
APART = Composition(0, 1, 2, 3, 1e-3, 8e3)
TOGETHER = Composition(0, 0, 0, 0, 1e-3, 8e3)
IN_TURN = TOGETHER._replace(in_turn=True)
HOST = pearl.HostEnvironment("tests.place.bad_envs:Bad-v0", {"how": "exits"})


def run(s, state, iterations, composition=APART, **given):
    given = {"composition": composition, "devices": jax.devices(), "iterations": iterations, **given}
    return pearl.run(s, state, KEY, **given)


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(a)[0], jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=jax.tree_util.keystr(path))


@pytest.fixture(scope="module")
def small():
    s = system()
    return s, s.init(jax.random.key(0))


# -- what it computes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"sub_batches": 4, "ahead": 2, "fanout": 3},
        {"updates": 1, "ahead": 1, "capacity": 20, "warmup": 12},
        {"updates": 5},
    ],
    ids=["sub-batches", "collisions", "many updates"],
)
def test_together_is_one_after_another(monkeypatch, given):
    """Bit for bit, with sub-batches, actors ahead, a ring so small that insertions collide, and another fan-out."""
    monkeypatch.setattr(do, "AT_ONCE", 2)
    s = system(**given)
    state = s.init(jax.random.key(0))
    assert state.manager.tree.fanout == given.get("fanout", 8)
    wanted = pearl.reference(s, state, KEY, 12)
    for composition, threads in ((APART, 4), (TOGETHER, 3), (IN_TURN, 1)):
        found, report = run(s, state, 12, composition)
        assert_equal(found, wanted)
        assert report.deferred if s.capacity == 20 else report.iterations == 12
        assert report.updates == s.updates * (12 - s.warm)
        assert len(report.busy) == threads


def test_one_program_for_all_updates_rounds_as_one_for_each_primitive():
    """Sums of products that XLA would fuse from one primitive into another, for forty updates of two layers with RMSprop."""
    s = deep(updates=4)
    state = s.init(jax.random.key(0))
    apart, _ = run(s, state, 12)
    assert_equal(run(s, state, 12, TOGETHER)[0], apart)
    assert_equal(pearl.reference(s, state, KEY, 12), apart)
    assert s.updates * (12 - s.warm) == 40


def test_nobody_is_in_turn_with_a_learner_elsewhere(small):
    with pytest.raises(PlacementError, match="is in_turn, with replay on device 0 and the learner on 1"):
        run(*small, 1, IN_TURN._replace(learner=1))


# -- threads that act or train ---------------------------------------------------------------------------------------


def scripted(monkeypatch, plans):
    """Have algorithm 1 say what a list does, whatever the times are: those that it saw."""
    rest, seen = iter(plans), []

    def reallocate(now, *seconds, step):
        seen.append((now, *seconds))
        return next(rest, now)

    monkeypatch.setattr("rlfx.place.pearl.plans.reallocate", reallocate)
    return seen


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("composition", [APART, TOGETHER])
def test_who_acts_and_who_trains_changes_nothing(monkeypatch, composition, ahead):
    """All threads but one train, then another number, then none: the bits of one after another."""
    s = system(actors=4, envs=1, sub_batches=4, ahead=ahead, warmup=8)
    state = s.init(jax.random.key(0))
    plans = [Pools(1, 3, 0.75), Pools(3, 1, 0.5), Pools(2, 2, 0.25), Pools(4, 0, 0.0), Pools(2, 2, 1.0)]
    seen = scripted(monkeypatch, plans)
    found, report = run(s, state, 29, composition, reallocate_every=2)
    assert_equal(found, pearl.reference(s, state, KEY, 29))
    assert report.pools[0] == (0, Pools(4, 0, 0.0))
    assert [pools for _, pools in report.pools[1:]] == plans
    each = 2 + ahead + 1  # two iterations are looked at; the plan holds from the first that no actor has begun
    assert [since for since, _ in report.pools[1:]] == [s.warm + each * n for n in range(1, 6)]
    learned, acted = np.array([row[1:3] for row in seen]).T
    assert np.all(learned > 0)
    assert np.all(acted > 0)
    assert all((trained > 0) == (now.trainers > 0) for now, _, _, trained in seen)


def test_threads_of_actors_train_where_the_learner_is_slow(monkeypatch):
    """Algorithm 1 by times that threads measured: a learner that waits for the host has half of them train."""

    def slow(n):
        time.sleep(0.01)
        return n

    def gradient(learner, x, weight, key):
        n = jax.pure_callback(slow, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(0.0))
        grads, errors, metrics = pearl_systems.gradient(learner, x, weight, key)
        return grads + n, errors, metrics

    s = system(actors=4, envs=1, sub_batches=4, updates=1, warmup=8, gradient=gradient)
    state = s.init(jax.random.key(0))
    found, report = run(s, state, 14, reallocate_every=4)
    assert_equal(found, pearl.reference(s, state, KEY, 14))
    assert report.pools[1][1] == Pools(2, 2, 0.25)
    assert "threads acted, 2 trained" in report.explain()


def test_processes_are_stepped_by_whoever_acts(monkeypatch):
    s = system(actors=2, sub_batches=2, env=pearl.HostEnvironment("CartPole-v1", {"max_episode_steps": 9}))
    state = s.init(jax.random.key(0))
    scripted(monkeypatch, [Pools(1, 1, 0.5), Pools(2, 0, 0.0)])
    found, report = run(s, state, 14, reallocate_every=3)
    assert_equal(found, run(s, state, 14)[0])
    assert_equal(found, run(s, state, 14, IN_TURN)[0])
    assert len(report.pools) == 3


def test_threads_need_something_to_take_over(small):
    s, state = small
    with pytest.raises(PlacementError, match=r"(?s)a batch of the system is one piece.*System\(sub_batches=4\)"):
        run(s, state, 1, reallocate_every=2)


# -- going on --------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_from_a_file(small, tmp_path):
    s, state = small
    first, _ = run(s, state, 5)
    save(tmp_path, first, int(first.iteration), KEY)
    found, done = latest(tmp_path, s.init(jax.random.key(9)), KEY)
    assert done == 5
    assert_equal(found, first)
    assert_equal(run(s, found, 6)[0], run(s, state, 11)[0])
    with pytest.raises(TrainingError, match="was written by a run with another key"):
        latest(tmp_path, state, jax.random.key(9))


def test_devices_change_nothing_and_what_is_given_stays(small):
    s, state = small
    before = jax.tree.map(np.array, state)
    apart, _ = run(s, state, 8)
    assert {leaf.device.id for leaf in jax.tree.leaves(apart.memory)} == {3}
    assert {leaf.device.id for leaf in jax.tree.leaves(apart.manager)} == {1}
    assert {leaf.device.id for leaf in jax.tree.leaves(apart.learner)} == {2}
    assert_equal(apart, run(s, state, 8, TOGETHER)[0])
    assert_equal(apart, pearl.reference(s, state, KEY, 8))
    assert_equal(state, before)


def test_a_run_goes_on_where_it_was(small):
    """In parts, the first of them stopped by the caller in the middle of a longer run."""
    s, state = small
    whole, _ = run(s, state, 11)
    first, report = run(s, state, 100, after=lambda call: "enough" if call.iteration == 5 else None)
    assert (report.reason, report.iterations) == ("enough", 5)
    assert_equal(run(s, first, 6)[0], whole)


def test_updates_for_steps_exactly(small):
    """After each iteration: no update before the warm-up ends, then two for twelve transitions; ages within the bound."""
    s, state = small
    seen = []
    after, report = run(s, state, 10, after=lambda call: seen.append((call.iteration, call.metrics)))
    assert s.warm == 2  # 24 transitions, of 20
    assert [metrics is None for _, metrics in seen] == [True, True] + [False] * 8
    assert int(after.learner.updates) == report.updates == 2 * (10 - s.warm)
    assert report.transitions == int(after.manager.position) + 64 * (10 * 12 // 64) == 120
    assert report.ages == {0: 4, 2: 16}  # chunks of two actors; the bound is 2 * (ahead + 1)
    assert max(report.peaks.values()) <= 1


def test_sub_batches_add_up_to_the_batch():
    """Against one gradient of the whole batch, by loops over NumPy arrays."""
    rng = np.random.default_rng(0)
    s = system(batch=8, sub_batches=4)
    state = s.init(jax.random.key(0)).learner
    x = pearl.Transition(
        rng.normal(size=(8, 4)).astype("f4"), rng.integers(0, 2, 8).astype("i4"), np.ones(8, "f4"),
        np.zeros(8, bool), np.zeros(8, bool), rng.normal(size=(8, 4)).astype("f4"),
    )  # fmt: skip
    weight = rng.uniform(0.1, 1, 8).astype("f4")
    total = None
    for p in range(4):
        part = jax.tree.map(lambda y: jnp.asarray(y[2 * p : 2 * p + 2]), x)
        found, _, _ = pearl.primitives.gradient(
            s, state, part, jnp.asarray(weight[2 * p : 2 * p + 2]), KEY, jnp.int32(0), jnp.int32(p)
        )
        total = found if total is None else pearl.primitives.added(total, found)
    found, _ = pearl.primitives.apply(s, state, total)
    w, wanted = np.asarray(state.w, np.float64), np.zeros((4, 2))
    for b in range(8):
        a = x.action[b]
        error = x.obs[b] @ w[:, a] - (0.1 + 0.9 * max(x.next_obs[b] @ w))
        wanted[:, a] += weight[b] * 2 * error * x.obs[b] / 8
    np.testing.assert_allclose(found.w, w - 0.05 * wanted, rtol=1e-5)


def test_insertions_that_would_overwrite_the_batch_wait():
    """The priority that the learner gives an index is never that of another transition: a plain ring with names."""
    s = system(updates=1, capacity=20, warmup=12)
    manager = rp.insert(rp.make_replay(20, jnp.zeros((0,), jnp.uint8)), jnp.zeros((12, 0), jnp.uint8))
    drawn = pearl.primitives.draw(s, manager, KEY, jnp.int32(0))
    next_slots = {(12 + i) % 20 for i in range(12)}
    assert bool(drawn.free) == (not next_slots & set(drawn.indices[0].tolist()))
    assert not bool(drawn.free)


# -- channels, versions, watching ------------------------------------------------------------------------------------


def test_a_full_queue_holds_back_who_fills_it():
    crew = Crew(5.0)
    channel, put, go = Channel(crew, "numbers", 3), [], threading.Event()

    def producer(part):
        for i in range(50):
            channel.put(part, i)
            put.append(i)

    got = []

    def consumer(part):
        go.wait()
        for _ in range(50):
            got.append(channel.get(part))
            assert len(put) <= len(got) + 3 + 1  # one more may be between its put and its note

    crew.start("producer", producer)
    crew.start("consumer", consumer, last=True)
    while crew.parts[0].waits != "room in numbers":
        time.sleep(0.01)
    assert put == [0, 1, 2]
    go.set()
    crew.watch()
    crew.stop()
    assert (got, channel.peak) == (list(range(50)), 3)


def test_who_takes_a_version_first_brings_it():
    crew, brought = Crew(5.0), []
    versions = Versions(crew, 2, {0: 0}, lambda weights: brought.append(weights) or -weights)
    part = Part(crew, "reads")
    versions.publish(1, 10)
    assert [versions.take(part, n) for n in (0, 1, 1)] == [0, -10, -10]
    versions.publish(2, 20)
    versions.publish(3, 30)
    assert [versions.take(part, n) for n in (3, 2, 3)] == [-30, -20, -30]
    assert brought == [10, 30, 20]
    assert versions.held == {2: -20, 3: -30}


def test_versions_are_kept_as_long_as_they_may_be_read():
    crew = Crew(5.0)
    versions, read = Versions(crew, 2, {0: "w0"}), []

    def reader(part):
        read.extend(versions.take(part, n) for n in (0, 1))

    crew.start("reader", reader, last=True)
    versions.publish(1, "w1")
    crew.watch()
    versions.publish(2, "w2")
    crew.stop()
    assert read == ["w0", "w1"]
    assert versions.held == {1: "w1", 2: "w2"}


def test_who_waits_is_woken_when_the_run_stops():
    crew, woken = Crew(60.0), []
    channel = Channel(crew, "nothing", 1)

    def waits(part):
        try:
            channel.get(part)
        except Stopped:
            woken.append(part.name)
            raise

    crew.start("waits", waits)
    while crew.parts[0].waits != "nothing":
        time.sleep(0.01)
    crew.stop()
    assert woken == ["waits"]
    assert crew.parts[0].done


def test_parts_have_the_settings_of_their_caller():
    seen = []

    def look(part):
        seen.append((jax.config.jax_numpy_rank_promotion, jax.config.jax_default_matmul_precision))

    with jax.numpy_rank_promotion("warn"), jax.default_matmul_precision("float32"):
        crew = Crew(5.0)
        crew.start("looks", look, last=True)
        crew.watch()
        crew.stop()
    assert seen == [("warn", "float32")]


def test_parts_that_all_wait_for_each_other_are_found():
    crew = Crew(0.2)
    one, two = Channel(crew, "one", 1), Channel(crew, "two", 1)
    crew.start("a", lambda part: one.get(part))
    crew.start("b", lambda part: two.get(part), last=True)
    with pytest.raises(PartError, match="Every part waits: 'a' for one, 'b' for two"):
        crew.watch()
    crew.stop()


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["raises", "is killed", "exits"])
def test_a_process_that_goes_ends_the_run_with_its_error(how):
    s = system(env=pearl.HostEnvironment("tests.place.bad_envs:Bad-v0", {"how": how}))
    says = {
        "raises": "RuntimeError: the motor is gone",
        "is killed": "ended with signal 9",
        "exits": "ended with exit code 7",
    }
    with pytest.raises(PartError, match=f"The part 'actor [01]'.*Bad-v0, .*{says[how]}") as error:
        run(s, s.init(jax.random.key(0)), 1000)
    assert error.value.part in ("actor 0", "actor 1")
    assert not [t.name for t in threading.enumerate() if t.name in ("replay", "learner", "actor 0", "actor 1")]


def test_a_process_has_the_session_of_its_caller_and_not_its_interrupts():
    with Process(Part(Crew(5.0), "actor 0"), pearl.HostEnvironment("CartPole-v1"), np.float32, [0]) as process:
        assert process.first().shape == (1, 4)
        pid = process.process.pid
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpgid(pid) == pid


def test_a_process_that_hangs_ends_the_run_after_the_patience():
    s = system(env=pearl.HostEnvironment("tests.place.bad_envs:Bad-v0", {"how": "hangs"}))
    state = s.init(jax.random.key(0))
    run(s, state, 5)  # compiles
    with pytest.raises(PartError, match=r"The part 'actor [01]' has worked on one thing for more than 3 s"):
        run(s, state, 1000, patience=3.0)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("actor")]


def raising(part, at):
    """A system whose learner or actors raise in their ``at``-th call on the host."""
    calls = itertools.count()

    def host(x):
        if next(calls) == at:
            raise RuntimeError(f"the {part} is out of order")
        return np.asarray(x)

    def broken(x):
        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")

    plain = system()
    if part == "learner":
        return system(apply=lambda state, grads: plain.apply(state, broken(grads)))
    return system(policy=lambda w, obs, key, t: plain.policy(w, broken(obs), key, t))


def test_an_environment_that_raises_in_turn_ends_the_run():
    s = system(env=pearl.HostEnvironment("tests.place.bad_envs:Bad-v0", {"how": "raises"}))
    with pytest.raises(PartError, match=r"'actors, replay and learner' raised RuntimeError: the motor is gone"):
        run(s, s.init(jax.random.key(0)), 1000, IN_TURN)


@pytest.mark.parametrize("part", ["learner", "actor"])
def test_a_part_that_raises_ends_the_run(part):
    s = raising(part, 10)
    with pytest.raises(PartError, match=f"The part '{part}.* raised (.|\n)*the {part} is out of order") as error:
        run(s, s.init(jax.random.key(0)), 1000)
    assert error.value.part.startswith(part)
    assert error.value.__cause__ is not None
    assert not [t.name for t in threading.enumerate() if t.name in ("replay", "learner", "actor 0", "actor 1")]


def test_what_the_caller_raises_ends_the_run(small):
    def after(call):
        raise KeyError("mine")

    with pytest.raises(PartError, match="'replay' raised KeyError: 'mine'"):
        run(*small, 10, after=after)


def test_the_callers_own_work_takes_what_it_takes(small):
    run(*small, 5)  # compiles
    _, report = run(*small, 5, patience=2.0, after=lambda call: time.sleep(3.0) if call.iteration == 4 else None)
    assert report.reason == "finished"


def test_an_interrupt_stops_all_parts(small):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(*small, 10_000, after=lambda call: _thread.interrupt_main() if call.iteration == 5 else None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not [t.name for t in threading.enumerate() if t.name in ("replay", "learner", "actor 0", "actor 1")]


# -- host environments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("composition", [APART, IN_TURN], ids=["in processes", "in turn"])
def test_gymnasium_in_processes_learns_from_what_it_says(composition):
    """CartPole for two actors: what replay holds follows gymnasium's dynamics, episode by episode."""
    s = system(
        env=pearl.HostEnvironment("CartPole-v1", {"max_episode_steps": 9}), envs=2, length=3, capacity=120, warmup=12
    )
    state, report = run(s, s.init(jax.random.key(0)), 10, composition)
    assert (report.transitions, int(state.manager.size)) == (120, 120)
    x = jax.tree.map(lambda leaf: np.asarray(leaf).reshape(10, 2, 3, 2, *leaf.shape[1:]), state.memory)
    x = jax.tree.map(lambda leaf: np.moveaxis(leaf, 2, 1).reshape(30, 4, *leaf.shape[4:]), x)  # [time, environment]
    assert x.truncated.any()
    np.testing.assert_allclose(x.next_obs[..., 0], x.obs[..., 0] + 0.02 * x.obs[..., 1], atol=1e-6)  # Euler
    done = x.terminated | x.truncated
    np.testing.assert_array_equal(x.obs[1:][~done[:-1]], x.next_obs[:-1][~done[:-1]])
    assert (np.abs(x.obs[1:][done[:-1]]) <= 0.05).all()  # a reset
    assert set(np.unique(x.action)) == {0, 1}


# -- composition, errors ---------------------------------------------------------------------------------------------


def test_a_composition_is_measured_and_run(small):
    s, state = small
    found = pearl.composed(s, state, jax.devices()[:2], np.full((2, 2), 1e9), repeats=1)
    assert found.actors == 0
    assert found.throughput == pytest.approx(s.updates * s.batch / found.iteration)
    work = pearl.workload(s, state)
    assert (work.batch, work.actors, work.experience_bytes, work.weight_bytes) == (16, 12, 4 * 4 * 2 + 4 + 4 + 2, 4 * 8)
    _, report = run(s, state, 4, found)
    assert report.predicted == found.iteration
    assert f"predicted {1e3 * found.iteration:.2f}" in report.explain()
    assert "4 iterations (finished): 48 transitions, 4 updates" in report.explain()


@pytest.mark.parametrize("sub_batches", [1, 2])
def test_primitives_are_rehearsed_as_a_run_calls_them(monkeypatch, sub_batches):
    """Twice as many reads of replay as updates where batches come in two parts; what is given is there afterwards."""
    s, read, calls = system(sub_batches=sub_batches), do.read, itertools.count()

    def slow(memory, indices):
        next(calls)
        time.sleep(0.02)
        return read(memory, indices)

    monkeypatch.setattr(do, "read", slow)
    state = s.init(jax.random.key(0))
    found = pearl.measured(s, state, jax.devices()[1:2], np.ones((1, 1)), repeats=2).seconds
    assert next(calls) == 3 * s.updates * sub_batches
    assert 0.02 * s.updates * sub_batches < found["sample"][0]
    assert all(row[0] > 0 for row in found.values())
    assert_equal(state, s.init(jax.random.key(0)))


def test_a_composition_with_host_environments_counts_their_steps(monkeypatch):
    """The policy on each device, and the steps, which take the same whatever the device."""
    s = system(env=pearl.HostEnvironment("CartPole-v1"))
    monkeypatch.setattr(pearl.HostEnvironment, "step_seconds", lambda env: 10.0)
    table = pearl.measured(s, s.init(jax.random.key(0)), jax.devices()[:2], np.full((2, 2), 1e9), repeats=1)
    assert ((table.seconds["actors"] > 3 * 2 * 10.0) & (table.seconds["actors"] < 3 * 2 * 10.0 + 5)).all()
    assert (table.seconds["train"] < 5).all()


def test_a_step_on_the_host_takes_a_time():
    assert 0 < pearl.HostEnvironment("CartPole-v1").step_seconds(20) < 1


MISTAKES = {
    "batch": (lambda: system(batch=9, sub_batches=2), "2 sub-batches of a batch of 9 are not of equal size"),
    "capacity": (lambda: system(capacity=10), "replay of 10, 12 transitions an iteration, 20 to warm up"),
    "policy": (lambda: system(policy=lambda w, obs: 0), r"policy must be a function of \(weights, obs, key, t\)"),
    "env": (lambda: system(env="CartPole-v1"), "env must be an environment, got 'CartPole-v1'"),
    "action": (
        lambda: system(policy=lambda w, obs, key, t: obs @ w).init(KEY),
        r"the policy returns .*\(2,\).* an action of the environment is Discrete",
    ),
    "reference": (lambda: pearl.reference(system(env=HOST), None, KEY, 1), "has state that jax does not see"),
    "dict": (
        lambda: pearl.HostEnvironment("Blackjack-v1").spaces(),
        r"Blackjack-v1 has the spaces ",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake):
    make, text = MISTAKES[mistake]
    with pytest.raises(PlacementError, match=text):
        make()


def test_a_state_of_another_system(small):
    text = r"run: \(actors, ahead, capacity\) of the state are \(2, 0, 64\), the system's are \(2, 1, 64\)"
    with pytest.raises(PlacementError, match=text):
        run(system(ahead=1), small[1], 1)


def test_a_composition_of_more_devices_than_are_given(small):
    with pytest.raises(PlacementError, match="The composition has device 2 for learner, and 2 devices are given"):
        run(*small, 1, devices=jax.devices()[:2])
