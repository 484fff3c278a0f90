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
from rlfx.place.pearl.forecast import Costs, predicted
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
    assert predicted(both, s, 1, 0, 0) == pytest.approx(rest + 0.25)  # weights are sent by the learner's thread
    # An actor has its next weights before its chunk is inserted: it acts without a pause.
    slow = costs(column(), column(factor=5.0))
    for ahead in (0, 1):
        assert predicted(slow, system(actors=1, ahead=ahead), 1, 0, 0) == pytest.approx(5.0 * 6.0 + 0.25)


def test_replay_and_learner_apart_hand_over_in_every_update():
    """Nothing overlaps but insertion and acting: a batch there, errors back, each with somebody to wake."""
    s = system(actors=1, updates=2)
    apart = costs(*[column(waits=1.5, others=2)] * 3)
    serial = 1.5 * (2.0 + 8.0 + 1.0) + 2 * 0.25 + 2 * 2 * WAKES
    assert predicted(apart, s, 2, 0, 1) == pytest.approx(serial + 0.25)  # the learner sends weights, too
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


def test_trials_decide_between_the_shortest_predictions(monkeypatch):
    """Of two that are tried the one that ran faster is taken, though it was predicted to be slower; others are not run."""
    s, ran, known = system(), [], costs(column(), column(factor=1.2))
    ranked = sorted(itertools.product(range(2), repeat=2), key=lambda pair: predicted(known, s, 0, *pair))
    monkeypatch.setattr(runtime, "_costs", lambda *_: known)
    taken = dict(zip(ranked, (9.0, 4.0, 1.0, 1.0), strict=True))

    def run(system, state, key, *, composition, devices, iterations):
        assert int(state.iteration) == system.warm
        ran.append((composition.replay, composition.learner))
        return state, SimpleNamespace(iteration=taken[ran[-1]])

    monkeypatch.setattr(runtime, "run", run)
    state, devices, links = s.init(jax.random.key(0)), jax.devices()[:2], np.full((2, 2), 1e9)
    best = pearl.composed(s, state, devices, links)
    assert ((best.replay, best.learner), ran) == (ranked[0], [])
    assert best.iteration == predicted(known, s, 0, *ranked[0])
    found = pearl.composed(s, state, devices, links, trials=2)
    assert ran == ranked[:2]
    assert ((found.replay, found.learner), found.iteration) == (ranked[1], 4.0)
    assert found.throughput == s.updates * s.batch / 4.0
    assert pearl.composed(s, state, devices, links, actors=1).actors == 1


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
