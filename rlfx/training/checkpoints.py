"""Checkpoints of everything, and runs that go on from them bit by bit."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from rlfx import _jaxpr as J
from rlfx._checks import KEY, NATURAL, PATH, POSITIVE, expect, integer
from rlfx.errors import ProgramError, TrainingError, located
from rlfx.training import files
from rlfx.training.loop import After, Call, Callback, Loop, owned, strong

tree = jax.tree_util

_FORMAT = 3
#: What reading a file raises that is not what was written.
_BROKEN = (OSError, ValueError, KeyError, TypeError)


@dataclasses.dataclass(frozen=True)
class Checkpoints(Callback):
    """Save the whole agent, and begin where the last whole checkpoint of ``directory`` ends.

    A resumed run is the run that was not interrupted, to the last bit, wherever the process was killed: an update depends
    on the agent, on the key of the run and on its number alone. Arrays are copied to the host after a call; a thread writes
    them while the next ones run, to a file that gets its name when it is complete. Of several processes
    (``jax.distributed``) the first one writes what all of them hold, and each reads it: ``directory`` is one that all see.

    Args:
      directory: where; it may not exist yet.
      every: after the call that reaches each ``every``-th update, and at the end of the run.
      keep: how many checkpoints stay, at least 2: the last one may turn out to be broken.

    Raises:
      TrainingError: the checkpoints are of another agent, another key or another version; none of them can be read; the
        directory can't be written.
    """

    directory: str | os.PathLike[str]
    every: int = 1
    keep: int = 3

    rank = 2

    def begin(self, loop: Loop) -> Loop:
        found = latest(self.directory, loop.agent, loop.key)
        return loop if found is None else dataclasses.replace(loop, agent=owned(found[0]), done=found[1])

    @contextmanager
    def opened(self, loop: Loop) -> Iterator[After]:
        every = expect("every", self.every, POSITIVE, TrainingError)
        keep = expect("keep", self.keep, integer(2), TrainingError)
        with _saving(_path(self.directory), keep, loop.agent, loop.key, loop.done) as save:
            saved, last = loop.done, None

            def after(call: Call) -> None:
                nonlocal saved, last
                last = call
                if call.reaches(every):
                    save(call.done, call.agent)
                    saved = call.done

            yield after
            if last is not None and last.done != saved:
                save(last.done, last.agent)


def save(directory: str | os.PathLike[str], agent: Any, done: int, key: jax.Array, *, keep: int = 3) -> None:
    """Write an agent as :class:`Checkpoints` does, and return when it is whole: for loops other than :func:`run`.

    Args:
      directory: where; it may not exist yet. :func:`latest` reads it.
      agent: a pytree of arrays, on whatever devices; numbers and NumPy's arrays are of the types that :func:`run` gives them.
      done: how many updates, or iterations, led to it.
      key: of the run.
      keep: how many checkpoints stay, at least 2.

    Raises:
      TrainingError: an argument is not of its kind, or the directory can't be written.
      ProgramError: a leaf of the agent is no array.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save(folder, jnp.arange(2.0), 10, jax.random.key(0))
      ...     latest(folder, jnp.zeros(2))
      (Array([0., 1.], dtype=float32), 10)
    """
    path = _path(directory)
    done = expect("done", done, NATURAL, TrainingError, of="save")
    key = expect("key", key, KEY, TrainingError, of="save")
    keep = expect("keep", keep, integer(2), TrainingError, of="save")
    agent = tree.tree_map(_known, agent)
    with _saving(path, keep, agent, key) as write:
        write(done, agent)


def latest(directory: str | os.PathLike[str], like: Any, key: jax.Array | None = None) -> tuple[Any, int] | None:
    """The agent of the last whole checkpoint, and how many updates led to it; None if there is no checkpoint.

    Args:
      directory: of :class:`Checkpoints`.
      like: an agent of the same structure, shapes and dtypes; arrays are placed as its are. Types alone will do:
        ``jax.eval_shape(init, key)``.
      key: the key of the run, if it has to be the same.

    Raises:
      TrainingError: as :class:`Checkpoints`; a newer one that is broken is named in a warning, and an older one is used.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     print(latest(folder + "/none", jnp.zeros(2)))
      None
    """
    path, found, broken = _path(directory), None, []
    like = tree.tree_map(_typed, like)
    with _files(path, "read"):
        steps = files.steps(path) if path.exists() else []
    for step in reversed(steps):
        try:
            found = step, *_read(path / str(step))
            break
        except _BROKEN as error:
            broken.append(f"{step} ({_first_line(error)})")
    _same_everywhere(path, None if found is None else found[0])
    if found is not None:
        step, about, arrays = found
        agent = _as(like, key, about, arrays, path / str(step))
        if broken:
            warnings.warn(f"{path}: broken checkpoints {', '.join(broken)}; going on from {step}.", stacklevel=2)
        return agent, about["done"]
    if broken:
        fact = f"No checkpoint in {path} can be read: {', '.join(broken)}."
        raise TrainingError(located(fact, where=J.here(), fix="Give another directory, to begin anew."))
    return None


def _path(directory: Any) -> Path:
    return Path(expect("directory", directory, PATH, TrainingError)).absolute()


# -- files -----------------------------------------------------------------------------------------------------------


@contextmanager
def _files(path: Path, done: str = "written") -> Iterator[None]:
    """What goes wrong with files in here is an error of ours; of several processes none goes on if one can't."""
    error = None
    try:
        yield
    except OSError as found:
        error = found
    if jax.process_count() > 1 and multihost_utils.process_allgather(np.bool_(error is not None)).any():
        error = error or OSError("another process says why")
    if error is not None:
        fact = f"Checkpoints in {path} can't be {done}: {_first_line(error)}."
        fix = f"Give a directory that can be {done}, on a disk with space. Checkpoints that are whole stay."
        raise TrainingError(located(fact, fix=fix)) from error


@contextmanager
def _saving(
    path: Path, keep: int, like: Any, key: jax.Array, last: float = math.inf
) -> Iterator[Callable[[int, Any], None]]:
    """``save(done, agent)``, for agents like ``like``: it returns when arrays are copied, a thread writes them.

    Checkpoints after ``last`` are removed, and all but the ``keep`` last written. Of several processes the first one writes.
    """
    leaves = [{"name": name, "type": _type(leaf), "bytes": _data(leaf).nbytes} for name, leaf in _named(like)]
    about = {"format": _FORMAT, "jax": jax.__version__, "key": _key_text(key), "leaves": leaves}
    writes, there = jax.process_index() == 0, []
    with _files(path):
        if writes:
            there = files.prepared(path, last)

    def write(done: int, data: np.ndarray) -> None:
        files.write(path / str(done), {**about, "done": done}, data)
        there[:] = files.thinned(path, [*(step for step in there if step != done), done], keep)

    with ThreadPoolExecutor(1, "checkpoints") as thread:
        writing: Future[None] | None = None

        def written() -> None:
            with _files(path):
                if writing is not None:
                    writing.result()

        def save(done: int, agent: Any) -> None:
            nonlocal writing
            written()  # a second copy would take the memory of one more agent
            data = _bytes(agent)
            if writes:
                writing = thread.submit(write, done, data)

        yield save
        written()


def _read(path: Path) -> tuple[dict[str, Any], list[np.ndarray]]:
    """What a checkpoint says of itself, and the bytes of its arrays; raises one of ``_BROKEN`` if they are not what was saved."""
    about, data = files.read(path)
    if about["format"] != _FORMAT:
        fact = f"Checkpoint {path.name} has format {about['format']}, this rlfx reads {_FORMAT}."
        raise TrainingError(located(fact, fix="Read it with the rlfx that wrote it, or give another directory."))
    return about, files.arrays(about, data)


def _same_everywhere(path: Path, step: int | None) -> None:
    """Several processes that read different checkpoints would train different agents."""
    if jax.process_count() == 1:
        return
    steps = multihost_utils.process_allgather(np.uint32(0 if step is None else step + 1))
    if (steps != steps[0]).any():
        read = ", ".join(str(int(step) - 1) if step else "none" for step in steps)
        fact = f"The processes read different checkpoints of {path}: {read}."
        raise TrainingError(located(fact, where=J.here(), fix="Give a directory that all of them see."))


def _as(like: Any, key: jax.Array | None, about: dict, arrays: list[np.ndarray], path: Path) -> Any:
    """The agent, if it is one like ``like`` and of a run with this key."""
    saved = {leaf["name"]: leaf["type"] for leaf in about["leaves"]}
    given = {name: _type(leaf) for name, leaf in _named(like)}
    differing = [n for n in [*saved, *given] if saved.get(n) != given.get(n)]
    if differing:
        name = differing[0]
        fact = f"{path} has {saved.get(name, 'nothing')} for agent{name}, the agent given has {given.get(name, 'nothing')}."
        raise TrainingError(located(fact, where=J.here(), fix="Give the agent that was saved, or another directory."))
    if key is not None and about["key"] != _key_text(key):
        fact = f"{path} was written by a run with another key."
        raise TrainingError(located(fact, where=J.here(), fix="Give the same key, or another directory."))
    return tree.tree_unflatten(tree.tree_structure(like), map(_placed, arrays, tree.tree_leaves(like)))


def _named(agent: Any) -> list[tuple[str, Any]]:
    return [(tree.keystr(path), leaf) for path, leaf in tree.tree_flatten_with_path(agent)[0]]


def _typed(leaf: Any) -> Any:
    """A leaf that has a type: arrays of jax and types stay, numbers and NumPy's arrays become what a run makes of them."""
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else _known(leaf)


def _known(leaf: Any) -> jax.Array:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        fact = f"agent takes arrays, got {leaf}."
        raise ProgramError(located(fact, where=J.here(), fix="Give the arrays; types alone are for latest(directory, like)."))
    return leaf if isinstance(leaf, jax.Array) else strong(leaf)


def _data(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if J.is_key(leaf) else leaf


def _bytes(agent: Any) -> np.ndarray:
    """A copy of all arrays, whole on every process: on CPUs ``np.asarray`` is the memory itself, which the next call writes."""
    leaves = [_data(leaf) for leaf in tree.tree_leaves(agent)]
    whole = [x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True) for x in leaves]
    if J.platform() != "cpu":
        whole = jax.device_get(whole)  # all of them are on their way before the first is waited for
    return np.concatenate([np.empty(0, np.uint8), *(np.asarray(x).reshape(-1).view(np.uint8) for x in whole)])


def _placed(array: np.ndarray, like: Any) -> jax.Array:
    """Bytes as an array like ``like``, on its devices; on none in particular if it is, or if it is a type without any."""
    if isinstance(like, jax.ShapeDtypeStruct):
        return _placed_as_type(array, like)
    data = _data(like)
    array = array.view(data.dtype).reshape(data.shape)
    if not data.is_fully_addressable:
        placed = _shared_out(array, data.sharding)
    else:
        placed = jax.device_put(array, data.sharding) if like.committed else jnp.asarray(array)
    return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(like)) if J.is_key(like) else placed


def _placed_as_type(array: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
    if J.is_key(like):
        impl = jax.random.key_impl(J.zero_keys((), like.dtype))
        data = jax.eval_shape(jax.random.key_data, like)
        keys = jax.random.wrap_key_data(jnp.asarray(array.view(data.dtype).reshape(data.shape)), impl=impl)
        return keys if like.sharding is None else jax.device_put(keys, like.sharding)
    array = array.view(like.dtype).reshape(like.shape)
    if like.sharding is None:
        return jnp.asarray(array)
    whole = like.sharding.is_fully_addressable
    return jax.device_put(array, like.sharding) if whole else _shared_out(array, like.sharding)


def _shared_out(array: np.ndarray, sharding: Any) -> jax.Array:
    """An array that each process has whole, as one of which each gives the parts of its own devices."""
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])


def _type(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _key_text(key: jax.Array) -> str:
    return f"{jax.random.key_impl(key)} {np.asarray(jax.random.key_data(key)).tolist()}"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
