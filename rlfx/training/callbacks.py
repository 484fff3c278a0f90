"""Callbacks that look: a progress bar, metrics in files, evaluation, and the ends of a run."""

from __future__ import annotations

import csv
import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx._checks import PATH, POSITIVE, expect, function
from rlfx.errors import TrainingError, located
from rlfx.training.loop import After, Call, Callback, Loop, arrays_of, key_of

tree = jax.tree_util

_EVALUATION = np.uint32(2**32 - 1)  # no update has this number


def missing(package: str, what: str) -> TrainingError:
    """The error for a package that is not installed."""
    return TrainingError(located(f"{what} needs {package}.", fix="pip install 'rlfx[training]'"))


def named(metrics: Any) -> dict[str, Any]:
    """The leaves of metrics by their path: ``{"loss/actor": ...}``."""
    leaves = tree.tree_flatten_with_path(metrics)[0]
    return {tree.keystr(path, simple=True, separator="/") or "value": leaf for path, leaf in leaves}


def _later(read: Callable[[Call], Any]) -> tuple[After, Callable[[], None]]:
    """``read`` of each call when the next one is under way, so that nothing waits; and what reads the last one."""
    waiting: list[Call] = []

    def after(call: Call) -> None:
        waiting.append(dataclasses.replace(call, agent=None))
        if len(waiting) > 1:
            read(waiting.pop(0))

    def rest() -> None:
        while waiting:
            read(waiting.pop(0))

    return after, rest


@dataclasses.dataclass(frozen=True)
class Progress(Callback):
    """A tqdm bar of updates, with the means of the metrics of the last call.

    Args:
      label: what stands before it.
      names: which metrics are shown (all scalars, by default the first four); of many agents, their mean.
      quiet: show nothing.
    """

    label: str = ""
    names: tuple[str, ...] | None = None
    quiet: bool = False

    @contextmanager
    def opened(self, loop: Loop) -> Iterator[After]:
        try:
            from tqdm import tqdm
        except ImportError as error:
            raise missing("tqdm", "Progress") from error
        with tqdm(
            total=loop.updates, initial=loop.done, desc=self.label or None, unit="update", disable=self.quiet or not _writes()
        ) as bar:

            def read(call: Call) -> None:
                found = named(call.metrics)
                chosen = list(found)[:4] if self.names is None else [name for name in self.names if name in found]
                bar.set_postfix({name: f"{np.nanmean(np.asarray(found[name])):.4g}" for name in chosen}, refresh=False)
                bar.update(call.done - call.begun)

            after, rest = _later(read)
            yield after
            rest()


# -- metrics ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CSV:
    """Rows of a file, for :class:`Metrics` and :class:`Evaluate`: ``update``, and a column for each number.

    A run that is resumed goes on behind its last checkpoint: rows of updates that will be made again are removed. A run
    from the beginning begins the file anew.

    Attributes:
      path: of the file; its folder is made.
    """

    path: str | os.PathLike[str]

    @contextmanager
    def opened(self, done: int) -> Iterator[Callable[[int, dict], None]]:
        path = Path(expect("path", self.path, PATH, TrainingError))
        with _files(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            header, rows = _rows(path, done)
            file = path.open("w", newline="")
            writer = csv.writer(file)
            writer.writerows([header, *rows] if header else [])
            file.flush()

        def write(update: int, metrics: dict) -> None:
            nonlocal header
            columns = _columns(metrics)
            names = ["update", *columns]
            if header and header != names:
                fact = f"{path} has the columns {header}, and there are metrics {names}."
                raise TrainingError(located(fact, fix="Give another path, or the metrics that the file has."))
            with _files(path):
                writer.writerows([[update, *columns.values()]] if header else [names, [update, *columns.values()]])
                file.flush()
            header = names

        with file:
            yield write


@contextmanager
def _files(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fact = f"{path} can't be written: {error}."
        raise TrainingError(located(fact, fix="Give a path in a directory that can be written, with space.")) from error


def _rows(path: Path, done: int) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of at most ``done`` updates, of a file that is there; a last half line is dropped."""
    if not done or not path.exists():
        return [], []
    with path.open(newline="") as file:
        header, *rows = list(csv.reader(file)) or [[]]
    whole = [row for row in rows if len(row) == len(header) and row[0].isdigit()]
    return header, [row for row in whole if int(row[0]) <= done]


def _columns(metrics: dict) -> dict[str, float]:
    columns = {}
    for name, value in metrics.items():
        value = np.asarray(value)
        if value.ndim == 0:
            columns[name] = value.item()
        else:
            columns |= {f"{name}[{','.join(map(str, i))}]": value[i].item() for i in np.ndindex(value.shape)}
    return columns


@dataclasses.dataclass(frozen=True)
class TensorBoard:
    """Scalars in TensorBoard's files (tensorboardX), for :class:`Metrics` and :class:`Evaluate`.

    Attributes:
      directory: of the files.
    """

    directory: str | os.PathLike[str]

    @contextmanager
    def opened(self, done: int) -> Iterator[Callable[[int, dict], None]]:
        try:
            from tensorboardX import SummaryWriter
            from tensorboardX.proto.summary_pb2 import Summary
            from tensorboardX.summary import scalar
        except ImportError as error:
            raise missing("tensorboardX", "TensorBoard") from error
        tag = cache(lambda name: scalar(name, 0.0).value[0].tag)  # without characters that TensorBoard does not take
        with SummaryWriter(os.fspath(self.directory), purge_step=done + 1 if done else None) as writer:

            def write(update: int, metrics: dict) -> None:
                values = [Summary.Value(tag=tag(name), simple_value=x) for name, x in _columns(metrics).items()]
                writer.file_writer.add_summary(Summary(value=values), update)  # an event for each would go through a pipe

            yield write


Sink = Any
"""``write(update, metrics)``, any function of a number and a dict of NumPy values; or :class:`CSV`, :class:`TensorBoard`.

Of several processes (``jax.distributed``) the first one alone writes files; a function is called in each."""


def _writes() -> bool:
    """Whether this process is the one of all that shows, and writes files."""
    return jax.process_index() == 0


def _open(sink: Sink, done: int) -> Any:
    if hasattr(sink, "opened"):
        return sink.opened(done) if _writes() else nullcontext(lambda update, metrics: None)
    fix = f"Give to=CSV({os.fspath(sink)!r})." if isinstance(sink, (str, os.PathLike)) else None
    return nullcontext(expect("to", sink, function("update", "metrics"), TrainingError, fix=fix))


@dataclasses.dataclass(frozen=True)
class Metrics(Callback):
    """What the updates return, one row an update, written while the next call runs.

    Args:
      to: a function ``write(update, metrics)``, :class:`CSV` or :class:`TensorBoard`; ``update`` counts from 1.
      every: rows of each ``every``-th update.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from rlfx.training import run
      >>> rows = []
      >>> _ = run(lambda n, key: (n + 1, {"n": n}), 0, jax.random.key(0), updates=4, per_call=3,
      ...         callbacks=[Metrics(lambda update, metrics: rows.append((update, int(metrics["n"]))), every=2)])
      >>> rows
      [(2, 1), (4, 3)]
    """

    to: Sink
    every: int = 1

    @contextmanager
    def opened(self, loop: Loop) -> Iterator[After]:
        every = expect("every", self.every, POSITIVE, TrainingError)
        with _open(self.to, loop.done) as write:

            def read(call: Call) -> None:
                found = {name: np.asarray(leaf) for name, leaf in named(call.metrics).items()}
                for i, update in enumerate(range(call.begun + 1, call.done + 1)):
                    if update % every == 0:
                        write(update, {name: leaf[i] for name, leaf in found.items()})

            after, rest = _later(read)
            yield after
            rest()


@dataclasses.dataclass(frozen=True)
class Evaluate(Callback):
    """``fn(agent, key)`` now and then, with keys of its own: training is the same with it and without.

    Args:
      fn: returns metrics, a pytree of arrays; it is jitted here. For a vmapped update give a vmapped ``fn``.
      every: after the call that reaches each ``every``-th update, and at the end.
      to: as in :class:`Metrics`.
      until: ``until(metrics) -> bool``, with NumPy values: end the run here.
    """

    fn: Callable[[Any, jax.Array], Any]
    every: int
    to: Sink = lambda update, metrics: None
    until: Callable[[Any], Any] | None = None

    @contextmanager
    def opened(self, loop: Loop) -> Iterator[After]:
        every = expect("every", self.every, POSITIVE, TrainingError)
        expect("fn", self.fn, function("agent", "key"), TrainingError)
        fn = jax.jit(lambda agent, key: arrays_of(self.fn, "fn", "metrics", agent, key))
        with _open(self.to, loop.done) as write:

            def after(call: Call) -> str | None:
                if not (call.reaches(every) or call.last):
                    return None
                found = tree.tree_map(np.asarray, fn(call.agent, _evaluation_key(loop.key, jnp.uint32(call.done))))
                write(call.done, named(found))
                return f"evaluation of update {call.done}" if self.until and bool(self.until(found)) else None

            yield after


@jax.jit
def _evaluation_key(key: jax.Array, done: jax.Array) -> jax.Array:
    """``fold_in(fold_in(key, _EVALUATION), done)``: compiled once a process, and as a loop, which takes half as long."""
    return jax.lax.scan(lambda key, i: (key_of(key, i), None), key, jnp.stack([jnp.uint32(_EVALUATION), done]))[0]


# -- ends ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stop(Callback):
    """End the run after the first call for whose metrics ``until(metrics)`` holds: NumPy values ``[updates, ...]``.

    It waits for each call.

    Args:
      until: ``until(metrics) -> bool``.

    Example:
      >>> from rlfx.training import run
      >>> update = lambda agent, key: (agent + 1, agent)
      >>> stop = Stop(lambda metrics: metrics.max() >= 5)
      >>> result = run(update, jnp.int32(0), jax.random.key(0), updates=100, per_call=4, callbacks=[stop])
      >>> result.done, result.reason
      (8, 'metrics of update 8')
    """

    until: Callable[[Any], Any]

    @contextmanager
    def opened(self, loop: Loop) -> Iterator[After]:
        until = expect("until", self.until, function("metrics"), TrainingError)

        def after(call: Call) -> str | None:
            return f"metrics of update {call.done}" if bool(until(tree.tree_map(np.asarray, call.metrics))) else None

        yield after


@dataclasses.dataclass(frozen=True)
class Interrupt(Callback):
    """Ctrl-C ends the run after the call under way: results are returned, files closed, checkpoints written.

    A second Ctrl-C interrupts at once, as usual.

    Args:
      signals: which signals do so; ``(signal.SIGINT, signal.SIGTERM)`` for schedulers of clusters.
    """

    signals: tuple[int, ...] = (signal.SIGINT,)

    @contextmanager
    def opened(self, loop: Loop) -> Iterator[After]:
        if threading.current_thread() is not threading.main_thread():
            fact = "Interrupt: only the main thread receives signals."
            raise TrainingError(located(fact, where=J.here(), fix="Leave it out, or run in the main thread."))
        received: list[str] = []
        usual = {number: signal.getsignal(number) for number in self.signals}

        def receive(number: int, _frame: Any) -> None:
            received.append(signal.Signals(number).name)
            signal.signal(number, usual[number])
            print(f"{received[0]}: stopping after this call; once more stops at once.", file=sys.stderr)

        for number in self.signals:
            signal.signal(number, receive)
        try:
            yield lambda call: received[0] if received else None
        finally:
            for number, handler in usual.items():
                signal.signal(number, handler)
