"""Ten programs of which is known where their time goes: by the clocks of their own threads, beside the profiler.

A program gets a directory and about how many seconds to run, and gives the report, ns by operation, and what limits it.
Times are those of `time.perf_counter` on a thread that never stops for others, else processor times: on a loaded machine
a thread that waits for a processor acts.
"""

import asyncio
import collections
import contextlib
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from rlfx.profile import Report, capture, operation, phase


@dataclass
class Truth:
    """What a program did: ns by operation (innermost, `(none)` outside), by its own clocks, and what may limit it."""

    bounds: tuple[str, ...]
    ns: collections.Counter = field(default_factory=collections.Counter)
    report: Report | None = None

    def timed(self, name: str, clock=time.perf_counter_ns):
        return Timed(self.ns, name, clock)

    def operation(self, name: str):
        """An operation, and its time by the program's clock right inside of it."""
        return Bracketed(self.ns, name)


class Timed:
    """Adds a block's time to a counter, and costs little itself."""

    __slots__ = ("begin", "clock", "name", "ns")

    def __init__(self, ns, name, clock):
        self.ns, self.name, self.clock = ns, name, clock

    def __enter__(self):
        self.begin = self.clock()

    def __exit__(self, *exc):
        self.ns[self.name] += self.clock() - self.begin


class Bracketed:
    """An operation, timed inside of its edges."""

    __slots__ = ("begin", "name", "ns", "opened")

    def __init__(self, ns, name):
        self.ns, self.name, self.opened = ns, name, operation(name)

    def __enter__(self):
        self.opened.__enter__()
        self.begin = time.perf_counter_ns()

    def __exit__(self, *exc):
        taken = time.perf_counter_ns() - self.begin
        self.opened.__exit__(*exc)
        self.ns[self.name] += taken


def burn(seconds: float) -> None:
    """Python that takes so much of the processor."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(200))


def threads(folder, seconds) -> Truth:
    """Two threads that take turns under a lock, one three times as busy; the main thread waits for them to end."""
    truth = Truth(("host",))
    turn = [threading.Lock(), threading.Lock()]  # of which C code waits: only the thread's clock tells that it blocks
    rounds = 15

    @operation("waiting")
    def worker(i: int, name: str, share: float) -> None:
        for _ in range(rounds):
            turn[i].acquire()
            with truth.operation(name):
                burn(seconds * share / rounds)
            turn[1 - i].release()

    turn[1].acquire()
    with capture(folder) as session, operation("waiting"):
        both = [threading.Thread(target=worker, args=a) for a in ((0, "simulation", 0.7), (1, "logging", 0.25))]
        for t in both:
            t.start()
        for t in both:
            t.join()
    truth.report = session.report()
    _fill(truth, "waiting")
    return truth


def queues(folder, seconds) -> Truth:
    """An actor and a learner on policy: each waits for what the other puts into a queue."""
    truth = Truth(("host",))
    weights, batches = queue.SimpleQueue(), queue.Queue()  # the one waits in C, the other in Python
    rounds = 12

    @operation("waiting")
    def actor() -> None:
        for _ in range(rounds):
            weights.get()
            with truth.operation("simulation"):
                burn(seconds / rounds * 0.75)
            batches.put(0)

    thread = threading.Thread(target=actor)
    with capture(folder) as session, operation("waiting"):
        thread.start()
        for _ in range(rounds):
            weights.put(0)
            batches.get()
            with truth.operation("learning"):
                burn(seconds / rounds * 0.2)
        thread.join()
    truth.report = session.report()
    _fill(truth, "waiting")
    return truth


ENVIRONMENT = """
import sys, time
for line in sys.stdin:
    time.sleep(float(line))
    print(0, flush=True)
"""


def processes(folder, seconds) -> Truth:
    """An environment in another process, behind a pipe: the program waits for it three quarters of its time."""
    truth = Truth(("blocked",))
    rounds = 15
    command = [sys.executable, "-S", "-c", ENVIRONMENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as child:

        def step(wait: float) -> None:
            child.stdin.write(f"{wait}\n")
            child.stdout.readline()

        step(0.0)
        with capture(folder) as session:
            for _ in range(rounds):
                with truth.operation("simulation"):
                    step(seconds / rounds * 0.75)
                with truth.operation("learning"):
                    burn(seconds / rounds * 0.2)
    truth.report = session.report()
    if truth.ns["learning"] > 0.8 * truth.ns["simulation"]:  # on a busy machine the processor is what it waits for
        truth.bounds = ("blocked", "host")
    _fill(truth, "(none)")
    return truth


def tasks(folder, seconds) -> Truth:
    """Two tasks of asyncio that take turns at every `await`: an environment far away, and a learner that computes."""
    truth = Truth(("host",))
    rounds = 12

    async def simulate() -> None:
        with operation("simulation"):
            for _ in range(rounds):
                await asyncio.sleep(seconds / rounds * 0.2)
                with truth.timed("simulation"):
                    burn(seconds / rounds * 0.15)

    async def learn() -> None:
        for _ in range(rounds):
            with operation("learning"), truth.timed("learning"):
                burn(seconds / rounds * 0.7)
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(simulate(), learn())

    with capture(folder) as session:
        asyncio.run(both())
    truth.report = session.report()
    _fill(truth, "simulation")
    return truth


@jax.jit
def _long(a, n):
    with operation("update"):
        return jax.lax.fori_loop(0, n, lambda i, c: jnp.tanh(c @ a), a)


def one_call(folder, seconds) -> Truth:
    """A whole training in one XLA call, of which a capture sees the middle: the main thread waits all the time."""
    truth = Truth(("device",))
    a = jnp.asarray(np.random.default_rng(0).normal(size=(192, 192)).astype(np.float32))
    jax.block_until_ready(_long(a, 1))
    begin = time.perf_counter()
    jax.block_until_ready(_long(a, 200))
    a_second = 200 / (time.perf_counter() - begin)
    done = []

    def side(target) -> None:
        time.sleep(0.1)
        with capture(target) as session:
            time.sleep(seconds)
            end = time.perf_counter()
        done.append((session, end))

    for longer in (3, 8, 20):  # how long a call takes varies on a busy machine: until it outlasts the capture
        thread = threading.Thread(target=side, args=(folder / str(longer),))
        thread.start()
        _long(a, int(a_second * (seconds + 0.3)) * longer).block_until_ready()
        ended = time.perf_counter()
        thread.join()
        session, captured = done[-1]
        if ended > captured:
            break
    else:
        raise AssertionError("the call was too short")
    truth.report = session.report()
    truth.ns = collections.Counter({"update": truth.report.window_ns})
    return truth


def eager(folder, seconds) -> Truth:
    """Functions of jax called one by one: half of it is jax's own Python, half its way to the device."""
    truth = Truth(("dispatch", "host"))
    a = jnp.ones((8, 8))

    def iteration(timed) -> None:
        with timed("inference"):
            b = a
            for _ in range(20):
                b = jnp.tanh(b + a)
            b.block_until_ready()
        with timed("simulation"):
            c = a
            for _ in range(6):
                c = jnp.sin(c) * 2
            c.block_until_ready()

    for _ in range(3):
        iteration(lambda name: contextlib.nullcontext())
    end = time.perf_counter() + seconds
    with capture(folder) as session:
        while time.perf_counter() < end:
            iteration(truth.operation)
    truth.report = session.report()
    _fill(truth, "(none)")
    return truth


def callbacks(folder, seconds) -> Truth:
    """A simulator in Python, called back from inside a program."""
    truth = Truth(("host",))
    rounds = 10

    def simulate(a):
        with operation("physics"), truth.timed("physics"):
            burn(seconds / rounds * 0.8)
        return np.asarray(a)

    @jax.jit
    def step(a):
        with operation("simulation"):
            a = jax.pure_callback(simulate, jax.ShapeDtypeStruct(a.shape, a.dtype), a)
        return a * 2

    a = jnp.ones(1000)
    jax.block_until_ready(step(a))
    truth.ns.clear()
    with capture(folder) as session:
        for _ in range(rounds):
            jax.block_until_ready(step(a))
    truth.report = session.report()
    known = truth.ns["physics"]
    truth.ns["(other)"] = truth.report.window_ns - known
    return truth


def host_environments(folder, seconds) -> Truth:
    """Environments of gymnasium, and a policy in jax, a call a step."""
    import gymnasium

    truth = Truth(("host",))
    env = gymnasium.make_vec("CartPole-v1", num_envs=64, vectorization_mode="sync")
    observed, _ = env.reset(seed=0)
    policy = jax.jit(lambda w, x: (x @ w).argmax(-1))
    w = jnp.ones((4, 2))
    np.asarray(policy(w, observed))
    end = time.perf_counter() + seconds
    with capture(folder) as session:
        while time.perf_counter() < end:
            with truth.operation("inference"):
                action = np.asarray(policy(w, observed))
            with truth.operation("simulation"):
                observed, *_ = env.step(action)
    truth.report = session.report()
    _fill(truth, "(none)")
    return truth


def nested(folder, seconds) -> Truth:
    """Operations in operations, in two phases: each has its own time, without that of those inside."""
    truth = Truth(("host",))
    with capture(folder) as session:
        for name in ("collect", "update"):
            with phase(name), operation("outer"):
                with truth.timed("outer"):
                    burn(seconds * 0.1)
                with operation("inner"):
                    with truth.timed("inner"):
                        burn(seconds * 0.15)
                    with operation("innermost"), truth.timed("innermost"):
                        burn(seconds * 0.05)
                with truth.timed("outer"):
                    burn(seconds * 0.1)
    truth.report = session.report()
    _fill(truth, "(none)")
    return truth


def exceptions(folder, seconds) -> Truth:
    """Operations left by exceptions, and by generators that are never finished."""
    truth = Truth(("host",))

    def fails() -> None:
        with operation("simulation"), operation("physics"), truth.timed("physics"):
            burn(seconds * 0.03)
            raise KeyError("simulator")

    def batches():
        with operation("loading"):
            for i in range(10):
                with truth.timed("loading"):
                    burn(seconds * 0.02)
                yield i

    with capture(folder) as session:
        for _ in range(10):
            with contextlib.suppress(KeyError):
                fails()
            with operation("learning"), truth.timed("learning"):
                burn(seconds * 0.02)
        rest = batches()
        next(rest)
        rest.close()
        with operation("learning"), truth.timed("learning"):
            burn(seconds * 0.4)
    truth.report = session.report()
    _fill(truth, "(none)")
    return truth


def _fill(truth: Truth, rest: str) -> None:
    """What the program's clocks do not cover belongs to the one operation that was open all the time."""
    truth.ns[rest] += max(0, truth.report.window_ns - truth.ns.total())


PROGRAMS = {
    f.__name__: f
    for f in (
        threads, queues, processes, tasks, one_call, eager, callbacks, host_environments, nested, exceptions,
    )
}  # fmt: skip


def innermost(report: Report) -> collections.Counter:
    """ns by innermost operation."""
    out: collections.Counter = collections.Counter()
    for row, ns in report.rows.items():
        out[row.path[-1] if row.path else "(none)"] += ns
    return out


def error(truth: Truth) -> float:
    """The share of the window that is attributed to another operation than the program says."""
    found = innermost(truth.report)
    if "(other)" in truth.ns:
        found = collections.Counter({k: found[k] for k in truth.ns})
        found["(other)"] = truth.report.window_ns - found.total()
    names = {*found, *truth.ns}
    return sum(abs(found[k] - truth.ns[k]) for k in names) / 2 / truth.report.window_ns
