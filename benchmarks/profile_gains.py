"""Gains that the profiler predicts for programs written by others, against those that the change has.

    python benchmarks/profile_gains.py [--checkouts DIR] [--rounds 7] [--captures 5] [NAME...]

Five programs are in `gain_programs/`, written as others write them: PureJaxRL's, CleanRL's and Stable-Baselines3's
shapes, a callback in a scan, a loop that compiles again. The others need `--checkouts`: DIR holds git clones `purejaxrl`,
`rlax` and `cleanrl` (commits in `COMMITS`; torch and tensorboard for CleanRL, whose replay buffer uses them, haiku and bsuite
for rlax); rejax comes from its package. Each case says which line is changed and how. A capture of the program as it is
gives the gains of `rlfx.profile.gains`; the one at that line is the prediction. By turns with the captures the program runs
as it is and changed, without a capture: the measured gain is the ratio of the medians of CPU times. Run it on one core
(`taskset -c 0`): there that is the time of a machine without others. `paid_in` gets the median of the runs as they are, so
that what profiling costs is not taken for the program's own. Writes benchmarks/results/profile_gains.json.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax

from rlfx.profile import Session, capture
from rlfx.profile.capture import machine
from rlfx.profile.gains import gains, paid_in
from rlfx.profile.tables import grid

RESULT = pathlib.Path(__file__).parent / "results/profile_gains.json"
COMMITS = {
    "purejaxrl": "31756b197773a52db763fdbe6d635e4b46522a73",
    "rlax": "4c5d25b2609879d321f5a432cdf88165574e57a7",
    "cleanrl": "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
}
Around = Callable[[], AbstractContextManager]
Edits = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Case:
    """A program and a change: `run(edits)` builds it and gives a function that runs it once inside of `around()`.

    `finds` (one of several) is in the source at the line of which the prediction is; the change leaves out `part` of that cost.
    """

    name: str
    change: str
    kind: str
    finds: str
    part: float
    edits: Edits
    run: Callable[[pathlib.Path, Edits], Callable[[Around], None]]


def module(path: pathlib.Path, edits: Edits, name: str) -> types.ModuleType:
    """The module of a file of somebody else's, with some of its text changed."""
    text = path.read_text()
    for old, new in edits:
        if old not in text:
            raise SystemExit(f"{path} has no {old!r}: another commit?")
        text = text.replace(old, new)
    made = types.ModuleType(name)
    made.__file__ = str(path)
    sys.modules[name] = made
    exec(compile(text, str(path), "exec"), made.__dict__)
    return made


def purejaxrl(checkouts: pathlib.Path, edits: Edits) -> Callable[[Around], None]:
    import purejaxrl as adapter

    adapter.COMMIT = COMMITS["purejaxrl"]
    with adapter._stand_ins():
        adapter._execute(str(checkouts / "purejaxrl"), "purejaxrl/wrappers.py", "wrappers")
        ppo = module(checkouts / "purejaxrl/purejaxrl/ppo.py", edits, "ppo")
    ppo.gymnax = types.SimpleNamespace(make=adapter._legacy_make)
    train = jax.jit(ppo.make_train({**adapter.DEFAULTS, "TOTAL_TIMESTEPS": 1.5e4, "DEBUG": True}))
    return jitted(train.lower(jax.random.PRNGKey(30)).compile())


def rejax(checkouts: pathlib.Path, edits: Edits) -> Callable[[Around], None]:
    import purejaxrl as adapter
    import rejax as package

    env, params = adapter._legacy_make("CartPole-v1")
    type(env).__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]  # its `__getattr__` has no end otherwise
    options = {"env": env, "env_params": params, "total_timesteps": 10_000, "eval_freq": 1_000, "num_envs": 16}
    algorithm = package.PQN.create(**options)
    if edits:
        algorithm = algorithm.replace(eval_callback=lambda algorithm, state, key: ())
    return jitted(jax.jit(algorithm.train).lower(jax.random.PRNGKey(0)).compile())


def jitted(train: Callable) -> Callable[[Around], None]:
    def once(around: Around) -> None:
        with around():
            jax.block_until_ready(train(jax.random.PRNGKey(30)))
            jax.effects_barrier()

    return once


def shape(script: str) -> Callable[[pathlib.Path, Edits], Callable[[Around], None]]:
    def build(checkouts: pathlib.Path, edits: Edits) -> Callable[[Around], None]:
        found = module(pathlib.Path(__file__).parent / "gain_programs" / script, edits, pathlib.Path(script).stem)

        def once(around: Around) -> None:
            with around():
                found.once()

        return once

    return build


class Clocked:
    """Numbers of a range; from one of them to another, the loop's body runs inside of a context."""

    def __init__(self) -> None:
        self.around: Around = contextlib.nullcontext

    def __call__(self, numbers: Iterable[int], first: int, last: int) -> Iterator[int]:
        with contextlib.ExitStack() as stack:
            for i in numbers:
                if i == first:
                    stack.enter_context(self.around())
                if i == last:
                    stack.close()
                    return
                yield i


def rlax(checkouts: pathlib.Path, edits: Edits) -> Callable[[Around], None]:
    from absl import flags

    for flag in flags.FLAGS.flags_by_module_dict().get("simple_dqn", []):  # of the program that was built before
        delattr(flags.FLAGS, flag.name)
    clocked = Clocked()
    folder = checkouts / "rlax/examples"
    loop = "for episode in range(train_episodes):"
    clock = ((loop, "for episode in clocked(range(train_episodes), 51, 251):"),)
    experiment = module(folder / "experiment.py", (*edits, *clock), "rlax.examples.experiment")
    experiment.clocked = clocked
    package = types.ModuleType("rlax.examples")
    package.experiment = experiment
    sys.modules["rlax.examples"] = package
    dqn = module(folder / "simple_dqn.py", (), "simple_dqn")
    flags.FLAGS(["simple_dqn", "--evaluate_every=100000"])  # of this module's own, which have their defaults until then

    def once(around: Around) -> None:
        clocked.around = around
        dqn.main(())

    return once


def cleanrl(script: str, environment: str, first: int, last: int, options: tuple[str, ...]):
    def build(checkouts: pathlib.Path, edits: Edits) -> Callable[[Around], None]:
        clocked = Clocked()
        sys.path.insert(0, str((checkouts / "cleanrl").absolute()))
        clock = (
            ('if __name__ == "__main__":', "def main():"),
            ("range(args.total_timesteps):", f"clocked(range(args.total_timesteps), {first}, {last}):"),
        )
        # gymnasium's vectors reset one step later now, so that the last observation is the next one already.
        newer = (("enumerate(truncations)", "enumerate(())"),)
        found = module(checkouts / "cleanrl/cleanrl" / script, (*edits, *clock, *newer), pathlib.Path(script).stem)
        found.clocked = clocked

        def once(around: Around) -> None:
            clocked.around = around
            sys.argv = [script, "--env-id", environment, "--learning-starts", "200", *options]
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # for its logs
                found.main()

        return once

    return build


EPOCHS = "_update_epoch, update_state, None, config"
LEARN = "agent.learner_step("
CRITIC = "if global_step % args.policy_frequency == 0:"
DDPG = cleanrl("ddpg_continuous_action_jax.py", "Pendulum-v1", 400, 1000, ("--exploration-noise", "0.1"))
DQN = cleanrl("dqn_jax.py", "CartPole-v1", 1000, 4000, ("--start-e", "0.05"))
EPOCH = "jax.lax.scan(epoch, (params, key), None, EPOCHS)"
GAE = "last = rewards[t]"
SHAPES = (
    Case("PureJaxRL's shape: one jitted training", "2 epochs, not 4", "device", EPOCH, 0.5,
         ((EPOCH, EPOCH.replace("EPOCHS", "EPOCHS // 2")),), shape("whole_training.py")),
    Case("CleanRL's shape: advantages in eager jax", "advantages in NumPy", "call of jax", GAE, 1.0,
         (("    out, last = [], jnp.zeros(4)", "    out, last, values = [], np.zeros(4), np.asarray(jnp.stack(values))"),
          ("jnp.stack(out[::-1])", "np.stack(out[::-1]).astype(np.float32)")), shape("eager_loop.py")),
    Case("Stable-Baselines3's shape: environments in Python", "observations not normalised", "python",
         "inputs = normalised(observed)", 1.0,
         (("inputs = normalised(observed)", "inputs = observed"),), shape("vec_env_loop.py")),
    Case("a callback in a scan", "no callback", "callback", "jax.debug.callback(", 1.0,
         (("jax.debug.callback(record, reward * jnp.ones(ENVS), done)", "pass"),), shape("callback_in_scan.py")),
    Case("a loop that compiles again", "batches of one length", "compile", "params = learn(", 1.0,
         (("batch = episode", "batch = np.resize(episode, (200, 4))"),), shape("recompiling.py")),
)  # fmt: skip
CASES = (
    Case("PureJaxRL ppo.py, CartPole-v1", "DEBUG off: no callback", "callback", "jax.debug.callback(callback, metric)", 1.0,
         (("jax.debug.callback(callback, metric)", "pass"),), purejaxrl),
    Case("PureJaxRL ppo.py, CartPole-v1", "2 epochs, not 4", "device", EPOCHS, 0.5,
         ((EPOCHS + '["UPDATE_EPOCHS"]', EPOCHS + '["UPDATE_EPOCHS"] // 2'),), purejaxrl),
    Case("rejax PQN, CartPole-v1", "no evaluation", "device", "eval_callback(|return evaluate(", 1.0, (("", ""),), rejax),
    Case("rlax simple_dqn.py, bsuite Catch", "no learning step", "program", LEARN, 1.0,
         (("params, learner_state = " + LEARN, "_ = ("),), rlax),
    Case("CleanRL ddpg_continuous_action_jax.py, Pendulum-v1", "actor updated half as often", "program", CRITIC, 0.5,
         ((CRITIC, CRITIC.replace("args.policy_frequency", "4")),), DDPG),
    Case("CleanRL dqn_jax.py, CartPole-v1", "network updated every 20 steps, not 10", "program", "update(", 0.5,
         (("if global_step % args.train_frequency == 0:", "if global_step % 20 == 0:"),), DQN),
)  # fmt: skip


def measured(
    run: Callable[[Around], None], inside: Callable[[], AbstractContextManager] | None = None
) -> tuple[Any, Any]:
    """`(wall seconds, CPU seconds)` of what is inside of `around`, and what `inside` gave."""
    taken: list[tuple[float, float]] = []
    given: list[Any] = []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with inside() if inside else contextlib.nullcontext() as session:
            begin = time.perf_counter(), time.process_time()
            yield
            taken.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
        given.append(session)

    with contextlib.redirect_stdout(io.StringIO()):
        run(around)
    return taken[0], given[0]


def at_line(found: list, case: Case) -> Any:
    """The gain at the line that the case changes; None if the tool does not name it."""
    for gain in found:
        path = pathlib.Path(gain.file)
        lines = path.read_text().splitlines() if path.is_file() else []
        near = "\n".join(lines[max(0, gain.number - 2) : gain.number + 2])
        if any(text in near for text in case.finds.split("|")) and gain.kind == case.kind:
            return gain
    return None


def measure(case: Case, checkouts: pathlib.Path, rounds: int, captures: int) -> dict:
    plain, changed = case.run(checkouts, ()), case.run(checkouts, case.edits)
    times: dict[str, list[tuple[float, float]]] = {"plain": [], "changed": []}
    measured(plain)
    measured(changed)
    sessions: list[tuple[tuple[float, float], Session]] = []
    for i in range(rounds):
        times["plain"].append(measured(plain)[0])
        times["changed"].append(measured(changed)[0])
        if i < captures:
            sessions.append(measured(plain, capture))
    wall, cpu = ({name: statistics.median(t[i] for t in found) for name, found in times.items()} for i in (0, 1))
    predicted, places, listed = [], [], []
    for (took, worked), session in sessions:
        report = session.report()
        # Others on the machine made the capture longer by took / worked, which is no cost of profiling.
        found = gains(report, 8, paid_in(report, cpu["plain"] * took / worked * 1e9))
        gain = at_line(found, case)
        predicted.append(1 / (1 - case.part * (1 - 1 / gain.speedup)) if gain else None)
        places.append(found.index(gain) + 1 if gain else None)
        listed.append([str(g) for g in found])
        shutil.rmtree(session.directory)
    known = [p for p in predicted if p]
    expected = statistics.median(known) if known else None
    gained = cpu["plain"] / cpu["changed"]
    return {
        "program": case.name, "change": case.change, "kind": case.kind, "predicted": expected, "measured": gained,
        "measured_wall": wall["plain"] / wall["changed"], "error": expected / gained - 1 if expected else None,
        "rank": places, "predictions": predicted, "captured": [took for took, _ in sessions], "seconds": times,
        "gains": listed,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkouts", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--captures", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=RESULT)
    parser.add_argument("names", nargs="*", help="parts of the cases' names")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    rows = []
    for case in (*SHAPES, *(CASES if arguments.checkouts else ())):
        if arguments.names and not any(n in f"{case.name} {case.change}" for n in arguments.names):
            continue
        rows.append(measure(case, arguments.checkouts, arguments.rounds, arguments.captures))
        r = rows[-1]
        print(json.dumps({k: v for k, v in r.items() if k != "seconds"}, indent=1), flush=True)
        found = {"machine": machine(), "date": datetime.date.today().isoformat(), "commits": COMMITS, "rows": rows}
        arguments.out.write_text(json.dumps(found, indent=1))
    body = [
        [r["program"], r["change"], *(f"{r[k]:.2f}" if r[k] else "-" for k in ("predicted", "measured"))] for r in rows
    ]
    print(grid(["program", "change", "predicted", "measured"], body, left=2))


if __name__ == "__main__":
    main()
