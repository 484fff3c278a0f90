"""``run``: a system trains on the devices of a composition, all of its parts at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from rlfx._checks import INT32, KEY, POSITIVE, expect, function, instance, integer, number, optional, reals
from rlfx.errors import PlacementError, located
from rlfx.place.compose import Composition, Table, Workload, memory_seconds
from rlfx.place.hardware import check_devices
from rlfx.place.pearl import parts
from rlfx.place.pearl import primitives as do
from rlfx.place.pearl.crew import Crew
from rlfx.place.pearl.forecast import Costs, in_turn, predicted
from rlfx.place.pearl.hands import hand
from rlfx.place.pearl.hosts import HostEnvironment
from rlfx.place.pearl.manager import Replay
from rlfx.place.pearl.rehearsal import rehearsed, woken
from rlfx.place.pearl.report import Report
from rlfx.place.pearl.system import SYSTEM, State, System, check_state

#: Parts at work together must be predicted to be so many times as fast as one after another: predictions of them are too short.
MARGIN = 1.25

_COMPOSITION = instance(Composition, "a Composition", "compose(table, work)")


def composed(
    system: System,
    state: State,
    devices: Sequence[Any],
    bandwidth: np.ndarray,
    repeats: int = 5,
    *,
    actors: int = 0,
    trials: int = 0,
) -> Composition:
    """The composition of a system with the shortest iteration, by rehearsing its primitives on every device.

    What is predicted is the run itself: its threads are simulated, with calls that take what they took in the rehearsal
    (equation 6, which `compose.compose` minimises, knows neither hand-overs nor calls after a wait). What the simulation does
    not know, such as Python's lock, trials do: the assignments with the shortest predictions are run, and the fastest is taken.
    One of them makes one part after another, in one thread (``in_turn``): where environments are few and fast, or devices no
    two, the parts gain less by being at work together than they take to hand over. Without trials it is taken unless another
    is predicted to be 1.25 times as fast.

    Args:
      system: what is to be run.
      state: of it, for the shapes.
      devices: jax devices, N of them.
      bandwidth: bytes per second between devices, ``[N, N]``, by which the experience memory is placed;
        `hardware.measured` has it.
      repeats: how many iterations are rehearsed on each device, and count in a trial.
      actors: the device of the actors.
      trials: how many assignments are tried, if several each twice, of which the longer one counts. Nothing of their runs is
        kept.

    Raises:
      PlacementError: an argument is not of its kind.
      PartError: a part failed in a trial.
    """
    system, state, devices, bandwidth, repeats = _measurable(system, state, devices, bandwidth, repeats, "composed")
    actors = expect("actors", actors, integer(0, len(devices) - 1), PlacementError, of="composed")
    trials = expect("trials", trials, integer(0, INT32), PlacementError, of="composed")
    costs, work = _costs(system, state, devices, repeats), workload(system, state)
    table, found, alone = costs.table(devices, bandwidth), [], []
    for replay, learner in itertools.product(range(len(devices)), repeat=2):
        traffic = [memory_seconds(table, work, actors, replay, learner, memory) for memory in range(len(devices))]
        # One program makes the updates where everything that it reads is on its device.
        memory = replay if replay == learner and system.sub_batches == 1 else int(np.argmin(traffic))
        places = actors, replay, learner, memory
        found.append(_composition(system, places, predicted(costs, system, actors, replay, learner), False))
        if replay == learner:
            alone.append(_composition(system, places, in_turn(costs, system, actors, replay), True))
    best = min(alone, key=lambda c: c.iteration)
    found = sorted([best, *found], key=lambda c: c.iteration * (1.0 if c.in_turn else MARGIN))
    chosen = found[:trials]
    if trials > 1 and best not in chosen:
        chosen[-1] = best
    # Twice, in turn: a machine's speed drifts, and who was lucky once is not chosen for it.
    rounds = [[_tried(system, state, c, devices, repeats) for c in chosen] for _ in range(2 if len(chosen) > 1 else 1)]
    tried = [max(same, key=lambda c: c.iteration) for same in zip(*rounds, strict=True)]
    return min(tried, key=lambda c: c.iteration) if tried else found[0]


def _composition(system: System, places: tuple[int, int, int, int], seconds: float, in_turn: bool) -> Composition:
    return Composition(*places, seconds, system.updates * system.batch / seconds, in_turn)


def _tried(system: System, state: State, composition: Composition, devices: Sequence[Any], repeats: int) -> Composition:
    """The same with the iteration's time in a run of replay that counts as warm."""
    warm = state._replace(iteration=jax.numpy.maximum(state.iteration, jax.numpy.int32(system.warm)))
    iterations = 2 * (repeats + 1)  # the second half counts
    _, report = run(system, warm, jax.random.key(0), composition=composition, devices=devices, iterations=iterations)
    return composition._replace(iteration=report.iteration, throughput=system.updates * system.batch / report.iteration)


def measured(system: System, state: State, devices: Sequence[Any], bandwidth: np.ndarray, repeats: int = 5) -> Table:
    """Seconds of an iteration's primitives, on every device: medians, by the calls that a run makes.

    Host environments are stepped here to see how long they take.

    Args:
      system, state, devices, bandwidth, repeats: as `composed` takes them.

    Raises:
      PlacementError: as `composed` does.
    """
    system, state, devices, bandwidth, repeats = _measurable(system, state, devices, bandwidth, repeats, "measured")
    return _costs(system, state, devices, repeats).table(devices, bandwidth)


def _measurable(system: Any, state: Any, devices: Any, bandwidth: Any, repeats: Any, of: str) -> tuple:
    """The arguments, if each is of its kind."""
    system = expect("system", system, SYSTEM, PlacementError, of=of)
    state = check_state(system, state, of)
    repeats = expect("repeats", repeats, POSITIVE, PlacementError, of=of)
    devices = check_devices(devices)
    bandwidth = np.asarray(expect("bandwidth", bandwidth, reals(2, "[N, N]"), PlacementError, of=of), float)
    return system, state, devices, bandwidth, repeats


def _costs(system: System, state: State, devices: Sequence[Any], repeats: int) -> Costs:
    columns = tuple(
        rehearsed(system, state, jax.random.key(0), device, [*devices[:d], *devices[d + 1 :]], repeats)
        for d, device in enumerate(devices)
    )
    host = isinstance(system.env, HostEnvironment)
    return Costs(columns, system.envs * system.length * system.env.step_seconds() if host else 0.0, woken())


def workload(system: System, state: State) -> Workload:
    """What an iteration moves.

    Raises:
      PlacementError: an argument is not of its kind.
    """
    system = expect("system", system, SYSTEM, PlacementError, of="workload")
    state = check_state(system, state, "workload")
    experience = sum(x.nbytes // x.shape[0] for x in jax.tree.leaves(state.memory))
    weights = sum(x.nbytes for x in jax.tree.leaves(state.weights[0]))
    return Workload(system.updates * system.batch, system.collected, experience, weights)


def run(
    system: System,
    state: State,
    key: jax.Array,
    *,
    composition: Composition,
    devices: Sequence[Any],
    iterations: int,
    after: Callable[[parts.Call], str | None] | None = None,
    patience: float = 120.0,
    reallocate_every: int | None = None,
) -> tuple[State, Report]:
    """Make iterations of a system, its parts at work together, each on its device.

    With a composition that is ``in_turn`` one thread makes all of it, one thing after another: the result is the same.

    In iteration ``i`` replay draws a batch by priority and streams it to the learner in sub-batches; while that learns, the
    transitions that the actors collected beside it are inserted, unless they would overwrite what the learner holds:
    then after its errors became priorities. Actors act in iteration ``i`` with the weights after iteration
    ``i - 1 - ahead``, whatever the timing: the same key gives the same result, however many devices there are.

    After each iteration from the first with updates on there were exactly ``updates`` updates for ``system.collected``
    transitions.

    Args:
      system: the algorithm and its sizes.
      state: what to begin with, or to go on from: ``system.init(key)``, or the state that a run returned. It stays as it is.
      key: of the whole run, the same one where a run goes on.
      composition: whose devices are indices of ``devices``.
      devices: jax devices.
      iterations: how many to make.
      after: is called after each, with a :class:`Call`; a string ends the run, and is the reason.
      patience: seconds after which a part that does not move ends the run. To compile counts, too.
      reallocate_every: after so many iterations, ``reallocate`` (algorithm 1) looks at the median times of learner, actors and
        trainers in them: threads of actors may go on to train sub-batches on the actors' device, while the others act for all
        actors. The result is the same. None: each thread acts for its actor. If given, a composition that is ``in_turn`` has
        threads all the same.

    Returns:
      The state after the last iteration, and a :class:`Report`.

    Raises:
      PartError: a part raised, hung, or its process was killed; ``error.part`` names it. All others have been stopped.
      PlacementError: an argument is not of its kind.

    Meng et al. 2024 (PEARL), sections 3.2 and 3.3.
    """
    system = expect("system", system, SYSTEM, PlacementError, of="run")
    state = check_state(system, state, "run")
    keys = do.Keys.of(expect("key", key, KEY, PlacementError, of="run"))
    composition = expect("composition", composition, _COMPOSITION, PlacementError, of="run")
    iterations = expect("iterations", iterations, integer(0, INT32), PlacementError, of="run")
    after = expect("after", after, optional(function("call")), PlacementError, of="run")
    patience = expect("patience", patience, number(above=0), PlacementError, of="run")
    every = expect("reallocate_every", reallocate_every, optional(POSITIVE), PlacementError, of="run")
    if every is not None and system.sub_batches == 1:
        fact = (
            "run: reallocate_every is given, and a batch of the system is one piece: threads have nothing to take over."
        )
        raise PlacementError(located(fact, fix="Give System(sub_batches=4), or no reallocate_every."))
    places = _places(composition, check_devices(devices))

    crew = Crew(patience)
    alone = composition.in_turn and every is None
    wires = parts.Wires.of(crew, system, places, keys, state, iterations, every, alone)
    account = parts.Account()
    replay = Replay(wires, state, after, account)
    actors = range(0 if alone else system.actors)
    try:
        named = "replay and learner" if wires.together else "replay"
        crew.start("actors, replay and learner" if alone else named, replay, last=True)
        if not wires.together:
            crew.start("learner", partial(parts.learner, wires, state.learner))
        for a in actors:
            crew.start(f"actor {a}", partial(hand, wires, a, state.actors[a]))
        crew.watch()
    finally:
        crew.stop()
    made = len(account.seconds)
    report = Report(
        made,
        account.updates,
        made * system.collected,
        account.reason,
        np.array(account.seconds),
        composition.iteration,
        {part.name: part.busy for part in crew.parts},
        {part.name: part.waited for part in crew.parts},
        {part.name: part.cpu for part in crew.parts},
        dict(account.ages),
        account.deferred,
        {channel.name: channel.peak for channel in (*wires.chunks, wires.batches, wires.learned)},
        tuple(wires.plans.made),
    )
    return replay.state, report


def _places(composition: Composition, devices: Sequence[Any]) -> parts.Places:
    where = {name: getattr(composition, name) for name in parts.Places._fields}
    wrong = next((name for name, d in where.items() if not 0 <= d < len(devices)), None)
    if wrong is not None:
        fact = f"The composition has device {where[wrong]} for {wrong}, and {len(devices)} devices are given."
        raise PlacementError(located(fact, fix="Give the devices that its table was measured on."))
    if composition.in_turn and composition.replay != composition.learner:
        fact = f"The composition is in_turn, with replay on device {composition.replay} and the learner on {composition.learner}."
        raise PlacementError(located(fact, fix="Put them on one device, or give in_turn=False."))
    return parts.Places(**{name: devices[d] for name, d in where.items()})
