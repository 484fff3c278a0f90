"""Several epochs over a rollout in shuffled minibatches: the learner of PPO and its kin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from rlfx import _jaxpr as J
from rlfx._checks import POSITIVE, TEXT, expect, function, instance, one_of, optional
from rlfx._target import target
from rlfx.errors import DomainError, ProgramError, ScheduleError, located
from rlfx.recurrence.api.machine import automatic
from rlfx.recurrence.cpu.contractions import FAST
from rlfx.recurrence.cpu.elementwise import ELEMENTS
from rlfx.recurrence.ir.interpret import rewritten
from rlfx.recurrence.language.operands import as_key, same_type, type_of
from rlfx.recurrence.language.shuffle import shuffle as keyed_shuffle
from rlfx.recurrence.rewrite.packed import packed
from rlfx.recurrence.rewrite.picks import picking
from rlfx.threefry import unrolled

tree = jax.tree_util


def minibatch_epochs(
    update: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    data: Any,
    *,
    epochs: int,
    minibatches: int,
    key: jax.Array,
    axis: str = "tb",
    shuffle: Callable[[jax.Array, int], jax.Array] = keyed_shuffle,
    mesh: Mesh | AbstractMesh | None = None,
    mesh_axis: str = "b",
) -> tuple[Any, Any]:
    """Run ``update`` on every minibatch of every epoch.

    Each minibatch is gathered when its turn comes: the shuffled data never exist as a whole.

    Args:
      update: ``update(carry, minibatch) -> (carry, aux)``.
      carry: params, optimiser state, whatever an update changes.
      data: a pytree of arrays with leading axes ``[T, B]``, from an unrolled program.
      epochs: how often all data are seen; each epoch shuffles anew.
      minibatches: into how many parts an epoch is divided. It must divide the number of points (or environments).
      key: a typed key.
      axis: ``"tb"`` mixes all points: a minibatch has leading axis ``[T * B / minibatches]``. ``"b"`` keeps sequences
        together, for recurrent policies: ``[T, B / minibatches]``.
      shuffle: ``shuffle(key, n) -> int[n]``, a permutation; :func:`rlfx.shuffle`, which does not sort, or
        ``jax.random.permutation``.
      mesh: devices; every minibatch is split over them, as :func:`rlfx.unroll` splits the environments. ``update`` sees
        whole minibatches and stays as it is (a mean is the mean of all), and so do the results, up to the order of
        sums: every device gets all the data once, and computes on its part of each minibatch.
      mesh_axis: the axis of ``mesh`` to split over.

    Returns:
      ``(carry, aux)``, each leaf of aux with leading axes ``[epochs, minibatches]``.

    Raises:
      DomainError: if the arguments do not divide the data, or leaves have different leading axes.
      ScheduleError: if the mesh has no such axis, or a minibatch cannot be split over it.

    Example:
      >>> import jax, jax.numpy as jnp, rlfx
      >>> data = jnp.arange(6.0).reshape(3, 2)
      >>> total, seen = rlfx.minibatch_epochs(lambda c, x: (c + x.sum(), x.shape[0]), 0.0, data,
      ...                                     epochs=2, minibatches=3, key=jax.random.key(0))
      >>> float(total), seen.shape
      (30.0, (2, 3))
    """
    expect("update", update, function("carry", "minibatch"), ProgramError)
    expect("shuffle", shuffle, function("key", "n"), ProgramError)
    epochs, minibatches = expect("epochs", epochs, POSITIVE), expect("minibatches", minibatches, POSITIVE)
    key = as_key(key)
    if key is None:
        raise ProgramError(located("minibatch_epochs shuffles, and needs a key.", where=J.here(), fix="Give key=...."))
    for path, leaf in tree.tree_flatten_with_path(carry)[0]:
        type_of(leaf, f"minibatch_epochs: carry{tree.keystr(path)}")
    rows, sequences = _flatten(data, axis)
    if sequences % minibatches:
        what = "points (T * B)" if axis == "tb" else "environments (B)"
        raise DomainError(
            located(
                f"minibatches={minibatches} does not divide the {sequences} {what} of the data.",
                where=J.here(),
                fix=f"Choose a divisor of {sequences}.",
            )
        )
    size = sequences // minibatches
    lead = 0 if axis == "tb" else 1
    place = _placement(mesh, mesh_axis, size)
    rows = tree.tree_map(place(), rows)
    pays = target().rewrites
    rules = {**({**ELEMENTS, **FAST} if pays.contractions else {}), **(picking(pays.picks) if pays.picks else {})}
    update, given = rewritten(update, rules), update

    def ordered(epoch_key):
        return _permutation(shuffle(epoch_key, sequences), sequences, shuffle).reshape(minibatches, size)

    def one(carry, indices):
        indices = place(mesh_axis)(indices)
        batch = tree.tree_map(lambda x: jnp.take(x, indices, axis=lead, unique_indices=True, mode="clip"), rows)
        batch = tree.tree_map(place(*(None,) * lead, mesh_axis), batch)
        with jax.named_scope(getattr(given, "__name__", "update")):  # so that profiles know it
            result = update(carry, batch)
        return _updated(result, carry, given)

    with jax.named_scope("minibatch_epochs"):
        keys = jax.random.split(unrolled(key), epochs)
        pack = pays.packed and mesh is None and epochs * minibatches >= STEPS
        indices = jax.eval_shape(lambda k: ordered(k)[0], keys[0]) if pack else None
        alike = None if indices is None else packed(one, carry, indices, pays.packed)
        if alike is None:
            return jax.lax.scan(lambda c, k: jax.lax.scan(one, c, ordered(k)), carry, keys)
        state, aux = jax.lax.scan(lambda c, k: jax.lax.scan(alike, c, ordered(k)), alike.pack(carry), keys)
        return alike.unpack(state), aux


#: From so many steps on they gain more than it takes to put arrays into vectors before the first, and to cut them after the last.
STEPS = 4

#: Devices, or a description of some that are not here: ``rlfx.target("h200:8").mesh("b")``.
_MESH = optional(instance((Mesh, AbstractMesh), "a mesh of devices", "rlfx.use_all_cores()"))


def _placement(mesh: Mesh | AbstractMesh | None, axis: str, size: int) -> Callable[..., Callable[[Any], Any]]:
    """``place(*partition)(x)`` is ``x``, laid out over the devices of the mesh."""
    expect("mesh", mesh, _MESH, ScheduleError)
    expect("mesh_axis", axis, TEXT, ScheduleError)
    if mesh is None:
        return lambda *_partition: lambda x: x
    if axis not in mesh.shape:
        fact = f"mesh_axis={axis!r} is not an axis of the mesh, which has {list(mesh.shape)}."
        raise ScheduleError(located(fact, where=J.here(), fix="Name one of them."))
    if size % mesh.shape[axis]:
        fact = f"Minibatches of {size} cannot be split over the {mesh.shape[axis]} devices of mesh axis {axis!r}."
        raise ScheduleError(located(fact, where=J.here(), fix="Choose fewer minibatches, or a batch that divides."))
    placed = automatic(mesh)
    return lambda *partition: (
        lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(placed, PartitionSpec(*partition)))
    )


def _flatten(data: Any, axis: str) -> tuple[Any, int]:
    expect("axis", axis, one_of("tb", "b"))
    paths = tree.tree_flatten_with_path(data)[0]
    leads = {type_of(leaf, f"minibatch_epochs: data{tree.keystr(path)}").shape[:2] for path, leaf in paths}
    if len(leads) != 1 or len(next(iter(leads))) != 2:
        raise DomainError(
            located(
                f"The leaves of data must have the same two leading axes [T, B]; they have {sorted(leads)}.",
                where=J.here(),
                fix="Give the out of an unrolled program, whose leaves all have them.",
            )
        )
    ((t, b),) = leads
    if axis == "b":
        return data, b
    return tree.tree_map(lambda x: jnp.reshape(x, (t * b, *jnp.shape(x)[2:])), data), t * b


def _permutation(order: Any, n: int, shuffle: Callable[..., Any]) -> Any:
    """What the caller's ``shuffle`` returned, if it can be a permutation."""
    found = type_of(order, "What shuffle returns", where := J.function_source(shuffle))
    if found.shape != (n,) or not jnp.issubdtype(found.dtype, jnp.integer):
        fact = f"shuffle(key, {n}) returned {J.short_dtype(found.dtype)}{list(found.shape)}."
        raise DomainError(located(fact, where=where, fix=f"Return a permutation of 0 .. {n - 1}: int32[{n}]."))
    return jnp.asarray(order)


def _updated(result: Any, carry: Any, update: Callable[..., Any]) -> tuple[Any, Any]:
    """What ``update`` returned: the next carry, of the type of the last one, and aux."""
    if not isinstance(result, tuple) or len(result) != 2:
        fact = f"update returned {type(result).__name__}, not (carry, aux)."
        raise ProgramError(located(fact, where=J.function_source(update), fix="Return (carry, aux)."))
    fix = "Return the carry with the structure, shapes and dtypes that it was given with."
    same_type(
        result[0],
        carry,
        "The carry that update returns",
        "the carry that it was given",
        fix,
        where=J.function_source(update),
        promoted=True,
    )
    return result
