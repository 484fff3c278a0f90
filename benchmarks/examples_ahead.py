"""Does it compile there? Every example's update, every form of plan and every kernel, for GPUs and TPUs that are not here.

    make targets                                                           # all of it, for h200, a100, t4 and v5e
    python benchmarks/examples_ahead.py [--targets h200 v5e] [--programs ppo_cartpole ...] [--json FILE]

Prints a row for each: what one call launches, temporary bytes, or the error's last lines. Exits with 1 if anything fails. What
rlfx refuses until a later jaxlib is a row of its own, and no failure. With `--json`, what the file has is not compiled again.
It shows that programs compile, not that they are right, nor fast. Left out: examples/place_block.py, which places a function
on the devices of this process, examples/two_roles.py and examples/distributed.py, which take two of them, and
examples/which_machine.py, which computes nothing; of examples/composed_*.py, whose loop is the host's, the learner's two
functions are compiled.
"""

import argparse
import dataclasses
import json
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import rlfx
from rlfx.envs import fast_prng
from rlfx.errors import RlfxError
from rlfx.place.pearl import system as place_system

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import a2c
import apg
import attention
import awr
import composed_dqn
import composed_sac
import decision_transformer
import dqn
import dqn_family
import es
import frame_stacking
import grpo
import gru_bptt
import her
import iteration_level
import learned_discount
import learned_rate
import maml
import memory_over_time
import multi_agent
import placed_ensemble
import policies
import population
import ppo
import ppo_continuous
import ppo_one_epoch
import pqn
import profile_dqn_loop
import r2d2
import recurrent_ppo
import reinforce
import sac
import sarsa_lambda
import search
import targets
import td3
import vtrace
import whole_run
from networks import init_actor_critic, init_mlp
from targets import KEY, states

S = jax.ShapeDtypeStruct
FAST = jax.eval_shape(lambda: jax.random.key(0, impl=fast_prng))


def shapes(init, *arguments):
    return jax.eval_shape(init, *arguments)


def nested(example, **options):
    """A whole run of eight iterations."""
    return example.make_train(iterations=8, **options), (None, shapes(example.init, KEY), KEY)


# -- examples: each an update, and the shapes of its arguments


def online(program, make_update, sizes, *, length, batch, env=a2c.env, init=None, key=KEY, **options):
    """Loss, gradient and optimiser of a per-timestep program."""
    loss_fn = rlfx.compile(program, length=length, batch=batch, **options)
    optimizer = optax.adam(1e-3)
    params = shapes(init or partial(init_mlp, sizes=sizes), KEY)
    return make_update(loss_fn, optimizer), ((params, shapes(optimizer.init, params), states(env, batch)), key)


def actor_critic(program, **options):
    return online(program, a2c.make_update, None, init=lambda key: init_actor_critic(key, (4, 64, 64, 2)), **options)


def off_policy_actor_critic():
    loss_fn, optimizer = rlfx.compile(vtrace.impala, length=32, batch=64), optax.adam(1e-3)
    params = shapes(lambda key: init_actor_critic(key, (4, 64, 64, 2)), KEY)
    agent = params, params, shapes(optimizer.init, params), states(vtrace.env, 64)
    return vtrace.make_update(loss_fn, optimizer, 4), (agent, (S((), jnp.int32), KEY))


def written_in(name):
    """A policy of flax or equinox, whose parameters are made here."""
    policy = policies.POLICIES[name](jax.random.key(0))
    program = policies.make_program(policy.apply)
    return online(program, reinforce.make_update, None, length=250, batch=32, init=lambda key: policy.params)


def recall(program):
    length, batch = 32, 64
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def gradient(params, symbols, h):
        return jax.value_and_grad(lambda p: loss_fn((p, symbols), h)[0])(params)

    h = None if program is gru_bptt.recall_solve else S((batch, gru_bptt.HIDDEN), jnp.float32)
    return gradient, (shapes(gru_bptt.init_params, KEY), S((length, batch), jnp.int32), h)


def images(title):
    """A plan of examples/memory_over_time.py, at its default size."""
    program, options = memory_over_time.plans(64, 64, 16)[title]
    loss_fn = rlfx.compile(program, length=64, batch=16, **options)
    params = shapes(lambda key: memory_over_time.init(key, 64), KEY)
    return jax.value_and_grad(loss_fn, has_aux=True), (params, S((16, 3, 64, 64), jnp.float32), KEY)


def recipe(make):
    made = make()
    return made.update, (shapes(made.init, KEY), KEY)


def online_dqn():
    program = rlfx.unroll(dqn.dqn, length=1000, batch=8)
    carry = shapes(lambda key: dqn.init_carry(key, 8), KEY)
    return lambda carry, key, t0: program(None, carry, key, t0=t0), (carry, KEY, S((), jnp.int32))


def sarsa():
    program = rlfx.unroll(sarsa_lambda.sarsa, length=2000, batch=16)
    carry = shapes(lambda key: sarsa_lambda.init_carry(key, 16), KEY)
    return lambda carry, key, t0: program(None, carry, key, t0=t0), (carry, KEY, S((), jnp.int32))


def composed(example):
    """An update of a composed example's learner, of a batch of transitions."""
    system = example.make()
    learner = shapes(example.init, KEY)
    one = shapes(lambda: place_system.example(system, system.weights(example.init(jax.random.key(0)))))
    transitions = jax.tree.map(lambda x: S((system.batch, *x.shape), x.dtype), one)

    def update(learner, transitions, weight, key):
        grads, errors, metrics = example.gradient(learner, transitions, weight, key)
        return example.apply(learner, grads), errors, metrics

    return update, (learner, transitions, S((system.batch,), jnp.float32), KEY)


def profiled():
    step = profile_dqn_loop.step
    return lambda carry: jax.lax.scan(step, carry, None, length=100)[0], (shapes(profile_dqn_loop.start),)


MAKES = {
    **{f"dqn_family: {name}": make for name, make in dqn_family.FAMILY.items()},
    **{f"decision_transformer: {name}": make for name, make in decision_transformer.FAMILY.items()},
    **{f"her: {name}": make for name, make in her.FAMILY.items()},
    **{f"multi_agent: {name}": make for name, make in multi_agent.FAMILY.items()},
    **{f"ppo: {name}": make for name, make in ppo.FAMILY.items()},
    **{f"ppo_continuous: {name}": make for name, make in ppo_continuous.FAMILY.items()},
    **{f"pqn: {name}": make for name, make in pqn.FAMILY.items()},
    **{f"sac: {name}": make for name, make in sac.FAMILY.items()},
    **td3.FAMILY,
    "apg": apg.make,
    "awr": awr.make,
    "es": es.make,
    "grpo": grpo.make,
    "learned_discount": learned_discount.make,
    "r2d2": r2d2.make,
    "recurrent_ppo": recurrent_ppo.make,
    "search": search.make,
}

EXAMPLES = {
    "a2c": partial(actor_critic, a2c.a2c, length=32, batch=64),
    "attention": partial(
        online, attention.reinforce, attention.make_update, None, length=128, batch=32, init=attention.init_params
    ),
    "composed_dqn": partial(composed, composed_dqn),
    "composed_sac": partial(composed, composed_sac),
    "dqn": online_dqn,
    "frame_stacking": partial(
        online, frame_stacking.reinforce, frame_stacking.make_update, (2 * frame_stacking.FRAMES, 64, 2), length=250, batch=32
    ),
    "fused_ppo": partial(actor_critic, ppo_one_epoch.ppo, length=128, batch=64, transform=rlfx.fuse_steps, key=FAST),
    "gru_bptt: carry": partial(recall, gru_bptt.recall_carry),
    "gru_bptt: solve": partial(recall, gru_bptt.recall_solve),
    "gru_bptt: truncated": lambda: recall(gru_bptt.truncated(4)),
    "iteration_level": lambda: (iteration_level.make_train(iterations=8), (KEY,)),
    "learned_rate": lambda: (jax.value_and_grad(learned_rate.make_reached()), (S((), jnp.float32), KEY)),
    "maml": partial(nested, maml),
    **{f"memory_over_time: {title}": partial(images, title) for title in memory_over_time.plans(64, 64, 16)},
    **{f"policies: {name}": partial(written_in, name) for name in policies.POLICIES},
    "placed_ensemble": lambda: (
        placed_ensemble.update, (shapes(placed_ensemble.init, KEY), shapes(placed_ensemble.transitions, KEY), KEY)
    ),
    "population": partial(nested, population),
    "ppo_cartpole": partial(targets.update, 16),
    "ppo_cartpole: acting as one kernel": partial(targets.update, 16, transform=rlfx.fuse_steps),
    "ppo_one_epoch": partial(actor_critic, ppo_one_epoch.ppo, length=128, batch=64),
    "profile_dqn_loop": profiled,
    "reinforce: [t:]": lambda: online(reinforce.make_program(), reinforce.make_update, (4, 64, 2), length=250, batch=32),
    "reinforce: [t:t + 25]": lambda: online(
        reinforce.make_program(25), reinforce.make_update, (4, 64, 2), length=250, batch=32
    ),
    "sarsa_lambda": sarsa,
    "vtrace": off_policy_actor_critic,
    "whole_run": partial(nested, whole_run),
    "whole_run: one iteration behind": partial(nested, whole_run, lag=1),
    **{name: partial(recipe, make) for name, make in MAKES.items()},
}  # fmt: skip


# -- forms of plans, on a program that all of them are legal for


def n_step(w, x, t):
    """A wide policy whose targets look eight timesteps ahead."""
    y = jnp.tanh(x @ w["in"])
    reward = rlfx.series(jax.lax.stop_gradient(y.mean()))
    gain = jax.lax.stop_gradient(rlfx.discounted_sum(reward[t : t + 8], 0.9))
    following = jax.lax.stop_gradient(jnp.tanh(0.9 * x + 0.1 * jax.random.normal(t.key, x.shape)))
    return (gain - y @ w["out"]) ** 2, following


def through_time(w, h, t):
    """A recurrence that the gradient flows through."""
    h = jnp.tanh(h @ w["in"] + jax.random.normal(t.key, h.shape))
    return (h @ w["out"]) ** 2, h


def planned(program, plan):
    length, batch, width = 64, 256, 64
    loss_fn = rlfx.compile(program, length=length, batch=batch, plan=plan)
    w = {"in": S((width, width), jnp.float32), "out": S((width,), jnp.float32)}
    return jax.value_and_grad(loss_fn, has_aux=True), (w, S((batch, width), jnp.float32), KEY)


FORMS = {
    "at once": rlfx.Plan(),
    "cached": dataclasses.replace(rlfx.Plan(), cached=True),
    "blocks": rlfx.Plan("blocks", 8),
    "blocks of environments": rlfx.Plan("blocks", 8, environments=64),
    "offloaded": rlfx.Plan("blocks", 8, offload=1 << 20),
    "stream": rlfx.Plan("stream", 16),
    "replay": rlfx.Plan("replay", 8),
}
PLANS = {f"plan: {name}": partial(planned, n_step, plan) for name, plan in FORMS.items()}
PLANS["plan: blocks through time"] = partial(planned, through_time, rlfx.Plan("blocks", 8))
PLANS["plan: one pass"] = partial(planned, through_time, rlfx.Plan("one pass"))


# -- kernels


def random_steps(name):
    env = rlfx.envs.make(name)
    return rlfx.fuse_steps(env, 1000, policy="random"), (KEY, states(env, 4096))


KERNELS = {
    f"fused steps: {name}": partial(random_steps, name)
    for name in ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "Pendulum-v1")
}

PROGRAMS = {**EXAMPLES, **PLANS, **KERNELS}


#: What rlfx refuses with the jaxlib that is installed, and says so: offloading on GPUs before 0.11.1.
LATER = "Install jaxlib>="


#: The order of rows in a file, and what is compiled for if nothing is said.
MACHINES = ("h200", "a100", "t4", "v5e", "h100", "v6e")


def compiled(name, machine):
    """A row of the table."""
    row = {"program": name, "target": machine}
    try:
        fn, arguments = PROGRAMS[name]()
        found = rlfx.target(machine).compile(fn, *arguments)
    except RlfxError as error:
        return {**row, "refused" if LATER in str(error) else "error": str(error)}
    return {
        **row,
        "launches": found.launches,
        "launches_at_least": found.launches_if(1),
        "temp_bytes": found.temp_bytes,
        "spill_bytes": found.spill_bytes,
        "versions": dict(found.versions),
    }


def place(row):
    """Where a row is in the file."""
    known = row["target"] in MACHINES
    return MACHINES.index(row["target"]) if known else len(MACHINES), [*PROGRAMS].index(row["program"])


def shown(row):
    said = row.get("error") or row.get("refused")
    if said:
        lines = said.splitlines()
        return (
            ("FAILED  " if "error" in row else "REFUSED  ") + lines[0] + "".join(f"\n    {line}" for line in lines[-4:])
        )
    return f"{targets.launched(row):>10} launches {row['temp_bytes'] / 1e6:10.2f} MB"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=MACHINES[:4])
    parser.add_argument("--programs", nargs="+", default=[*PROGRAMS], choices=[*PROGRAMS])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = json.loads(args.json.read_text())["rows"] if args.json and args.json.exists() else []
    done = {(row["program"], row["target"]) for row in rows}
    for machine in args.targets:
        for name in args.programs:
            if (name, machine) in done:
                continue
            rows.append(compiled(name, machine))
            print(f"{machine:6} {name:48} {shown(rows[-1])}", flush=True)
            if args.json:
                targets.write(args.json, sorted(rows, key=place))
    failed = sum("error" in row for row in rows)
    refused = sum("refused" in row for row in rows)
    print(f"{len(rows) - failed - refused} of {len(rows)} compile; {refused} wait for a later jaxlib; {failed} fail")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
