"""``run``: a system trains on the devices of a composition, all of its parts at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from rlfx._checks import INT32, KEY, POSITIVE, expect, function, instance, integer, number, optional, reals
from rlfx.errors import PlacementError, located
from rlfx.place.compose import PRIMITIVES, Composition, Table, Workload, compose
from rlfx.place.hardware import check_devices
from rlfx.place.pearl import parts
from rlfx.place.pearl import primitives as do
from rlfx.place.pearl.crew import Crew
from rlfx.place.pearl.hands import hand
from rlfx.place.pearl.hosts import HostEnvironment
from rlfx.place.pearl.rehearsal import rehearsed
from rlfx.place.pearl.report import Report
from rlfx.place.pearl.system import SYSTEM, State, System, check_state

_COMPOSITION = instance(Composition, "a Composition", "compose(table, work)")


def composed(
    system: System, state: State, devices: Sequence[Any], bandwidth: np.ndarray, repeats: int = 5
) -> Composition:
    """The composition of a system, by measuring its primitives on every device.

    Args:
      system: what is to be run.
      state: of it, for the shapes.
      devices: jax devices, N of them; the actors get the first.
      bandwidth: bytes per second between devices, ``[N, N]``; `hardware.measured` has it.
      repeats: how many iterations are rehearsed on each device.

    Raises:
      PlacementError: an argument is not of its kind.
    """
    table = measured(system, state, devices, bandwidth, repeats)
    return compose(table, workload(system, state))


def measured(system: System, state: State, devices: Sequence[Any], bandwidth: np.ndarray, repeats: int = 5) -> Table:
    """Seconds of an iteration's primitives, on every device: medians, by the calls that a run makes.

    Host environments are stepped here to see how long they take.

    Args:
      system, state, devices, bandwidth, repeats: as `composed` takes them.

    Raises:
      PlacementError: as `composed` does.
    """
    system = expect("system", system, SYSTEM, PlacementError, of="measured")
    state = check_state(system, state, "measured")
    repeats = expect("repeats", repeats, POSITIVE, PlacementError, of="measured")
    devices = check_devices(devices)
    bandwidth = np.asarray(expect("bandwidth", bandwidth, reals(2, "[N, N]"), PlacementError, of="measured"), float)
    columns = [rehearsed(system, state, jax.random.key(0), device, repeats) for device in devices]
    seconds = {name: np.array([column[name] for column in columns]) for name in PRIMITIVES}
    if isinstance(system.env, HostEnvironment):  # processes step at the same time
        seconds["actors"] += system.envs * system.length * system.env.step_seconds()
    return Table(tuple(map(str, devices)), seconds, bandwidth)


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
        actors. The result is the same. None: each thread acts for its actor.

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
    wires = parts.Wires.of(crew, system, places, keys, state, iterations, every)
    account = parts.Account()
    replay = parts.Replay(wires, state, after, account)
    try:
        crew.start("replay and learner" if wires.together else "replay", replay, last=True)
        if not wires.together:
            crew.start("learner", partial(parts.learner, wires, state.learner))
        for a in range(system.actors):
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
    return parts.Places(**{name: devices[d] for name, d in where.items()})
