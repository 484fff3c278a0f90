"""What is predicted of an iteration, before it is run: against times counted by hand, and what trials make of it."""

import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from rlfx.errors import PlacementError
from rlfx.place import pearl
from rlfx.place.compose import PRIMITIVES, Composition
from rlfx.place.pearl import runtime
from rlfx.place.pearl.forecast import Costs, in_turn, predicted
from rlfx.place.pearl.rehearsal import SENT, Column
from tests.place.pearl_systems import system

SECONDS = dict(zip(PRIMITIVES, (6.0, 2.0, 8.0, 1.0, 0.5), strict=True))  # actors, sample, train, update, insert
WAKES = 0.01


def column(factor=1.0, send=0.25, others=1, waits=1.0):
    """A device so many times as slow, slower again where it waits between calls."""
    together = {name: factor * seconds for name, seconds in SECONDS.items()}
    apart = {name: waits * seconds for name, seconds in together.items()}
    return Column(together, apart, {what: [send] * others for what in SENT})


def costs(*columns, steps=0.0):
    return Costs(columns, steps, WAKES)


def test_one_device_does_everything_one_after_another():
    alone = costs(column(others=0))._replace(wakes=0.0)
    for s in (system(), system(actors=1), system(sub_batches=4), system(updates=1)):
        assert predicted(alone, s, 0, 0, 0) == pytest.approx(sum(SECONDS.values()))


def test_actors_beside_replay_and_learner_take_no_time_until_they_are_the_slowest():
    s, rest = system(actors=1), 2.0 + 8.0 + 1.0 + 0.5
    both = costs(column(), column())
    assert predicted(both, s, 1, 0, 0) == pytest.approx(rest)  # actors bring their weights themselves
    # An actor has its next weights before its chunk is inserted: it acts without a pause.
    slow = costs(column(), column(factor=5.0))
    for ahead in (0, 1):
        assert predicted(slow, system(actors=1, ahead=ahead), 1, 0, 0) == pytest.approx(5.0 * 6.0 + 0.25 + 0.25)


def test_replay_and_learner_apart_hand_over_in_every_update():
    """Nothing overlaps but insertion and acting: a batch there, errors back, each with somebody to wake."""
    s = system(actors=1, updates=2)
    apart = costs(*[column(waits=1.5, others=2)] * 3)
    serial = 1.5 * (2.0 + 8.0 + 1.0) + 2 * 0.25 + 2 * 2 * WAKES
    assert predicted(apart, s, 2, 0, 1) == pytest.approx(serial)
    # Acting on replay's device begins with new weights, when replay has work, too, and is not interrupted.
    assert predicted(apart, s, 0, 0, 1) == pytest.approx(serial + 0.25 + 1.5 * 6.0, rel=0.02)


def test_no_device_does_more_than_one_thing_at_a_time():
    """No prediction is below what the busiest device does, nor above everything one after another."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        columns = [column(*rng.uniform(0.2, 5.0, 2), others=2, waits=rng.uniform(1, 2)) for _ in range(3)]
        s = system(actors=int(rng.integers(1, 4)), updates=int(rng.integers(1, 5)), sub_batches=int(rng.choice([1, 2, 4])),
                   ahead=int(rng.integers(0, 2)))  # fmt: skip
        a, r, l = (int(d) for d in rng.integers(0, 3, 3))
        work = dict.fromkeys(range(3), 0.0)
        kind = (lambda c: c.together) if r == l else (lambda c: c.apart)
        work[a] += columns[a].apart["actors"]
        work[r] += sum(kind(columns[r])[name] for name in ("sample", "update", "insert"))
        work[l] += kind(columns[l])["train"]
        sends = sum(columns[x].sends["batch"][0] for x in (a, r, l)) * 2
        wakes = WAKES * (2 * s.updates * s.sub_batches + 4 * s.actors + 4)
        assert max(work.values()) - 1e-9 <= predicted(costs(*columns), s, a, r, l) <= sum(work.values()) + sends + wakes


def test_processes_step_beside_each_other():
    s = system(actors=2, length=2)
    found = predicted(costs(column(), column(), steps=100.0), s, 1, 0, 0)
    assert 100.0 < found < 100.0 + sum(SECONDS.values()) + 1.0


def tried(monkeypatch, known, taken):
    """Have a rehearsal say ``known``, and a run of ``(replay, learner, in_turn)`` take ``taken``: what was run."""
    ran = []

    def run(system, state, key, *, composition, devices, iterations):
        assert int(state.iteration) == system.warm
        ran.append((composition.replay, composition.learner, composition.in_turn))
        return state, SimpleNamespace(iteration=taken(ran[-1]))

    monkeypatch.setattr(runtime, "_costs", lambda *_: known)
    monkeypatch.setattr(runtime, "run", run)
    return ran


def test_trials_decide_between_the_shortest_predictions(monkeypatch):
    """Of those that are tried the one that ran fastest is taken, though it was predicted to be slower; others are not run."""
    s, known = system(), costs(column(), column(factor=1.2))
    ranked = sorted(itertools.product(range(2), repeat=2), key=lambda pair: predicted(known, s, 0, *pair))
    ran = tried(monkeypatch, known, lambda where: {ranked[0]: 9.0, ranked[1]: 4.0}.get(where[:2], 6.0))
    state, devices, links = s.init(jax.random.key(0)), jax.devices()[:2], np.full((2, 2), 1e9)
    best = pearl.composed(s, state, devices, links)
    assert ((best.replay, best.learner, best.in_turn), ran) == ((*ranked[0], False), [])
    assert best.iteration == predicted(known, s, 0, *ranked[0])
    found = pearl.composed(s, state, devices, links, trials=3)
    assert set(ran) == {(*ranked[0], False), (*ranked[1], False), (0, 0, True)}
    assert ((found.replay, found.learner), found.iteration) == (ranked[1], 4.0)
    assert found.throughput == s.updates * s.batch / 4.0
    assert pearl.composed(s, state, devices, links, actors=1).actors == 1


def test_one_part_after_another_where_being_at_work_together_gains_little(monkeypatch):
    """By prediction, with a margin; of what is tried one is always that, and taken if it ran faster."""
    short = Column({**column().together, "actors": 2.0}, {**column().apart, "actors": 2.0}, column().sends)
    state, devices, links = system().init(jax.random.key(0)), jax.devices()[:2], np.full((2, 2), 1e9)
    ran = tried(monkeypatch, costs(short, short), lambda where: 7.0 if where[2] else 8.0)
    found = pearl.composed(system(), state, devices, links)  # 13.5 in turn, 11.5 together
    assert (found.replay, found.learner, found.memory, found.in_turn, found.iteration) == (0, 0, 0, True, 13.5)
    tried(monkeypatch, costs(column(), column()), lambda where: 7.0 if where[2] else 8.0)
    long = pearl.composed(system(), state, devices, links)  # 17.5 in turn
    assert (long.replay, long.learner, long.in_turn) == (1, 1, False)
    ran = tried(monkeypatch, costs(column(), column()), lambda where: 7.0 if where[2] else 8.0)
    found = pearl.composed(system(), state, devices, links, trials=2)
    assert (ran[-1], found.in_turn, found.iteration) == ((0, 0, True), True, 7.0)


def test_one_program_for_an_iterations_updates_is_what_counts_where_there_is_one():
    s, whole = system(actors=1), {"updates": 5.0, "close": 0.25}
    both = costs(column()._replace(whole=whole), column()._replace(whole=whole))
    assert predicted(both, system(actors=1, ahead=1), 1, 0, 0) == pytest.approx(6.0 + 0.25 + 0.25)  # the actor's
    assert in_turn(both, s, 0, 0) == pytest.approx(6.0 + 5.0 + 0.25)
    assert in_turn(both._replace(steps=3.0), system(actors=2), 1, 0) == pytest.approx(
        6.0 + 2 * 3.0 + 5.25 + 0.25 + 0.25
    )
    assert predicted(both, s, 0, 0, 1) > 2 * 11.0 / 2  # apart nothing is one program


def test_who_was_lucky_in_one_trial_is_not_chosen_for_it(monkeypatch):
    """Two rounds in turn: 3 and 9 seconds are longer than 7 and 7."""
    calls = itertools.count()
    taken = lambda where: 7.0 if where[2] else (3.0, 9.0)[next(calls)]  # noqa: E731
    ran = tried(monkeypatch, costs(column(), column()), taken)
    found = pearl.composed(
        system(), system().init(jax.random.key(0)), jax.devices()[:2], np.full((2, 2), 1e9), trials=2
    )
    assert ran == [(1, 1, False), (0, 0, True)] * 2
    assert (found.in_turn, found.iteration) == (True, 7.0)


def test_a_trial_runs_and_keeps_nothing():
    s = system()
    state = s.init(jax.random.key(0))
    found = pearl.composed(s, state, jax.devices()[:2], np.full((2, 2), 1e9), repeats=1, trials=4)
    assert isinstance(found, Composition)
    assert 0 < found.iteration < 10
    assert int(state.iteration) == 0
    jax.tree.map(np.testing.assert_array_equal, state, s.init(jax.random.key(0)))


def test_the_device_of_the_actors_is_one():
    s = system()
    with pytest.raises(PlacementError, match="actors must be an integer from 0 to 0"):
        pearl.composed(s, s.init(jax.random.key(0)), jax.devices()[:1], np.ones((1, 1)), actors=1)
