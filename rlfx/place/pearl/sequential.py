"""What a run means: the same iterations one after another, in one thread, on one device, with replay in one piece."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlfx._checks import INT32, KEY, expect, integer
from rlfx.errors import PlacementError, located
from rlfx.place import replay as rp
from rlfx.place.pearl import primitives as do
from rlfx.place.pearl.hosts import HostEnvironment
from rlfx.place.pearl.system import SYSTEM, State, System, check_state


def reference(system: System, state: State, key: jax.Array, iterations: int) -> State:
    """The state that `run` leads to, of a system with JAX environments.

    Raises:
      PlacementError: the environments are the host's; an argument is not of its kind.
    """
    system = expect("system", system, SYSTEM, PlacementError, of="reference")
    if isinstance(system.env, HostEnvironment):
        fact = f"reference: {system.env.name} has state that jax does not see."
        raise PlacementError(located(fact, fix="Give a system with a JAX environment."))
    state = check_state(system, state, "reference")
    keys = do.Keys.of(expect("key", key, KEY, PlacementError, of="reference"))
    iterations = expect("iterations", iterations, integer(0, INT32), PlacementError, of="reference")
    begin = int(state.iteration)
    learner, actors = state.learner, state.actors
    replay = state.manager._replace(data=state.memory)
    newest = system.version(begin)
    versions = {max(0, newest - system.ahead + i): w for i, w in enumerate(state.weights)}
    for i in range(begin, begin + iterations):
        weights = versions[system.version(i - system.ahead)]
        acted = [do.act(system, weights, s, keys.act, jnp.int32(i), jnp.int32(a)) for a, s in enumerate(actors)]
        actors = tuple(s for s, _ in acted)
        new = jax.tree.map(lambda *x: jnp.concatenate(x), *(chunk for _, chunk in acted))
        if i < system.warm:
            replay = rp.insert(replay, new)
            continue
        for u in range(system.updates):
            update = jnp.int32(system.update(i, u))
            batch = rp.sample(replay, jax.random.fold_in(keys.draw, update), system.batch)
            weight = rp.importance_weights(batch.probability, replay.size, system.beta)
            total, errors = None, []
            for p, (x, w) in enumerate(zip(_parts(system, batch.data), _parts(system, weight), strict=True)):
                found, e, _ = do.gradient(system, learner, x, w, keys.learn, update, jnp.int32(p))
                total = found if total is None else do.added(total, found)
                errors.append(e)
            learner, latest = do.apply(system, learner, total)
            last = u == system.updates - 1
            now = last and bool(rp.collision_free(replay, system.collected, batch.indices))
            replay = rp.insert(replay, new) if now else replay
            raised = jnp.abs(jnp.concatenate(errors)) + do.LEAST
            replay = rp.update_priorities(replay, batch.indices, raised, system.alpha)
            replay = rp.insert(replay, new) if last and not now else replay
        versions[system.version(i + 1)] = latest
    end = begin + iterations
    kept = tuple(versions[max(0, system.version(end) - age)] for age in range(system.ahead, -1, -1))
    manager = replay._replace(data=state.manager.data)
    return State(jnp.int32(end), learner, kept, manager, replay.data, actors)


def _parts(system: System, x: object) -> list:
    size = system.batch // system.sub_batches
    return [jax.tree.map(lambda y: y[p * size : (p + 1) * size], x) for p in range(system.sub_batches)]
