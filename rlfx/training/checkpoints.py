"""Checkpoints of everything, and runs that go on from them bit by bit."""

from __future__ import annotations

import dataclasses
import os
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from rlfx import _jaxpr as J
from rlfx._checks import KEY, NATURAL, PATH, POSITIVE, expect, integer
from rlfx.errors import TrainingError, located
from rlfx.training.callbacks import missing
from rlfx.training.loop import After, Call, Callback, Loop, owned

tree = jax.tree_util

_FORMAT = 2
#: What reading a file raises that is not what was written.
_BROKEN = (OSError, ValueError, KeyError, TypeError)


@dataclasses.dataclass(frozen=True)
class Checkpoints(Callback):
    """Save the whole agent, and begin where the last whole checkpoint of ``directory`` ends.

    A resumed run is the run that was not interrupted, to the last bit, wherever the process was killed: an update depends
    on the agent, on the key of the run and on its number alone. Arrays are copied to the host after a call; orbax writes
    them while the next ones run, to a directory that gets its name when it is complete. Of several processes
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
        with _manager(_path(self.directory), keep) as manager:
            saved, last = loop.done, None
            for broken in (step for step in manager.all_steps() if step > loop.done):
                manager.delete(broken)

            def save(call: Call) -> None:
                nonlocal saved
                _save(manager, call.done, call.agent, loop.key)
                saved = call.done

            def after(call: Call) -> None:
                nonlocal last
                last = call
                if call.reaches(every):
                    save(call)

            yield after
            if last is not None and last.done != saved:
                save(last)


def save(directory: str | os.PathLike[str], agent: Any, done: int, key: jax.Array, *, keep: int = 3) -> None:
    """Write an agent as :class:`Checkpoints` does, and return when it is whole: for loops other than :func:`run`.

    Args:
      directory: where; it may not exist yet. :func:`latest` reads it.
      agent: a pytree of arrays, on whatever devices.
      done: how many updates, or iterations, led to it.
      key: of the run.
      keep: how many checkpoints stay, at least 2.

    Raises:
      TrainingError: an argument is not of its kind, or the directory can't be written.

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
    with _manager(path, keep) as manager:
        _save(manager, done, agent, key)


def latest(directory: str | os.PathLike[str], like: Any, key: jax.Array | None = None) -> tuple[Any, int] | None:
    """The agent of the last whole checkpoint, and how many updates led to it; None if there is no checkpoint.

    Args:
      directory: of :class:`Checkpoints`.
      like: an agent of the same structure, shapes and dtypes; arrays are placed as its are.
      key: the key of the run, if it has to be the same.

    Raises:
      TrainingError: as :class:`Checkpoints`; a newer one that is broken is named in a warning, and an older one is used.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     print(latest(folder + "/none", jnp.zeros(2)))
      None
    """
    path = _path(directory)
    if not path.exists():
        return None
    broken = []
    with _manager(path, None) as manager:
        for step in sorted(manager.all_steps(), reverse=True):
            try:
                about, arrays = _read(manager, step)
            except _BROKEN as error:
                broken.append(f"{step} ({_first_line(error)})")
                continue
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


# -- writing ---------------------------------------------------------------------------------------------------------


def _orbax() -> tuple[Any, Any]:
    """orbax, and what it writes our arrays by."""
    try:
        import orbax.checkpoint

        from rlfx.training import arrays
    except ImportError as error:
        raise missing("orbax-checkpoint", "Checkpoints") from error
    return orbax.checkpoint, arrays


@contextmanager
def _files(path: Path) -> Iterator[None]:
    """What goes wrong with files in here is an error of ours; orbax gives those of its threads as other errors."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        fact = f"Checkpoints in {path} can't be written: {_first_line(error)}."
        fix = "Give a directory that can be written, on a disk with space. Checkpoints that are whole stay."
        raise TrainingError(located(fact, fix=fix)) from error


@contextmanager
def _manager(path: Path, keep: int | None) -> Iterator[Any]:
    """orbax's manager of a directory, closed when everything is written."""
    ocp, _ = _orbax()
    with _files(path):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, cleanup_tmp_directories=keep is not None)
        manager = ocp.CheckpointManager(path, options=options)
    try:
        yield manager
    finally:
        with _files(path):
            manager.close()


def _save(manager: Any, done: int, agent: Any, key: jax.Array) -> None:
    ocp, written = _orbax()
    arrays = [_bytes(leaf) for leaf in tree.tree_leaves(agent)]
    leaves = [
        {"name": name, "type": _type(leaf), "bytes": array.nbytes, "crc": zlib.crc32(array)}
        for (name, leaf), array in zip(_named(agent), arrays, strict=True)
    ]
    about = {"format": _FORMAT, "jax": jax.__version__, "done": done, "key": _key_text(key), "leaves": leaves}
    save = ocp.args.Composite(agent=written.Save(arrays), about=ocp.args.JsonSave(about))
    with _files(Path(manager.directory)):
        manager.save(done, args=save, force=True)


def _read(manager: Any, step: int) -> tuple[dict, list[np.ndarray]]:
    """What a checkpoint says of itself, and the bytes of its arrays; raises one of ``_BROKEN`` if they are not what was saved."""
    ocp, written = _orbax()
    about = manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore())).about
    if about["format"] != _FORMAT:
        fact = f"Checkpoint {step} has format {about['format']}, this rlfx reads {_FORMAT}."
        raise TrainingError(located(fact, fix="Read it with the rlfx that wrote it, or give another directory."))
    sizes = [leaf["bytes"] for leaf in about["leaves"]]
    arrays = manager.restore(step, args=ocp.args.Composite(agent=written.Restore(sizes))).agent
    for array, leaf in zip(arrays, about["leaves"], strict=True):
        if zlib.crc32(array) != leaf["crc"]:
            raise ValueError(f"{leaf['name']} is not what was saved")
    return about, arrays


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


def _bytes(leaf: jax.Array) -> np.ndarray:
    """A copy, uint8, whole on every process: on CPUs ``np.asarray`` is the memory itself, which the next call writes."""
    data = jax.random.key_data(leaf) if J.is_key(leaf) else leaf
    if not data.is_fully_addressable:
        data = multihost_utils.process_allgather(data, tiled=True)
    return np.array(data, copy=True, order="C").reshape(-1).view(np.uint8)


def _placed(array: np.ndarray, like: jax.Array) -> jax.Array:
    """Bytes as an array like ``like``, on its devices; on none in particular if it is."""
    data = jax.random.key_data(like) if J.is_key(like) else like
    array = array.view(data.dtype).reshape(data.shape)
    if not data.is_fully_addressable:  # each process gives the parts of its own devices
        placed = jax.make_array_from_callback(array.shape, data.sharding, lambda part: array[part])
    else:
        placed = jax.device_put(array, data.sharding) if like.committed else jnp.asarray(array)
    return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(like)) if J.is_key(like) else placed


def _type(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _key_text(key: jax.Array) -> str:
    return f"{jax.random.key_impl(key)} {np.asarray(jax.random.key_data(key)).tolist()}"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
