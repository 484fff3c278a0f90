"""PPO's update over devices that are not here: bytes of one device, and where devices meet.

    python benchmarks/meshes.py [--targets h200:8 h200:2x8 v5e:4x4] [--json FILE]
    python benchmarks/meshes.py --table benchmarks/results/meshes.json           # the tables of docs/targets.md

Each mesh beside one device of its kind, for the same environments. Two updates: TimeRL's one epoch (`ppo_timerl.py`, B = 4,096),
and 4 epochs of 4 minibatches (examples/ppo_cartpole.py, 4,096 environments). Nothing is run.
"""

import argparse
import json
import pathlib

import jax
import ppo_timerl
import targets
from jax.sharding import NamedSharding, PartitionSpec

import rlfx

BATCH = 4096
ppo_cartpole = targets.ppo_cartpole


def split(mesh, environments):
    """Shapes of what each environment has, over the mesh."""
    if mesh is None:
        return environments
    lie = NamedSharding(mesh, PartitionSpec("b"))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lie), environments)


def one_epoch(mesh):
    init = lambda key: jax.vmap(ppo_timerl.env_reset)(jax.random.split(key, BATCH))  # noqa: E731
    params = jax.eval_shape(lambda key: ppo_timerl.init(key, 64), targets.KEY)
    state = split(mesh, jax.eval_shape(init, targets.KEY))
    return ppo_timerl.compiled_by_rlfx(BATCH, mesh), (params, state, targets.KEY)


def minibatches(mesh):
    optimizer = ppo_cartpole.make_optimizer(100)
    rollout = rlfx.unroll(ppo_cartpole.act, length=ppo_cartpole.LENGTH, batch=BATCH, mesh=mesh)
    params, opt_state, carry = jax.eval_shape(lambda key: ppo_cartpole.init_agent(key, optimizer, BATCH), targets.KEY)
    update = ppo_cartpole.make_update(rollout, optimizer, mesh)
    return update, ((params, opt_state, split(mesh, carry)), targets.KEY)


PROGRAMS = {"PPO, one epoch": one_epoch, "PPO 4x4": minibatches}


def compiled(name, machine):
    target = rlfx.target(machine)
    fn, arguments = PROGRAMS[name](target.mesh("b") if target.devices > 1 else None)
    found = target.compile(fn, *arguments)
    return {
        "program": name,
        "target": machine,
        "devices": target.devices,
        "temp_bytes": found.temp_bytes,
        "launches": found.launches,
        "collectives": [vars(c) for c in found.collectives],
        "loops": [targets.described(loop) for loop in found.loops],
        "versions": dict(found.versions),
    }


def met(row):
    """Collectives in words."""
    said = [
        f"{c['count']} {c['kind']} of {c['bytes']:,} bytes{' in loops' if c['in_loop'] else ''}"
        for c in row["collectives"]
    ]
    return "; ".join(said) or "none"


def table(rows):
    alone = {(r["program"], r["target"]): r["temp_bytes"] for r in rows if r["devices"] == 1}
    lines = [
        "| program | machine | MB of a device | part of one device's | devices meet |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        part = row["temp_bytes"] / alone[row["program"], row["target"].partition(":")[0]]
        cells = row["program"], row["target"], f"{row['temp_bytes'] / 1e6:.1f}", f"{part:.3f}", met(row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=["h200:8", "h200:2x8", "v5e:4x4"])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--table", type=pathlib.Path, help="print the table of these results, and compile nothing")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())["rows"]))
        return
    machines = list(dict.fromkeys(x for name in args.targets for x in (name.partition(":")[0], name)))
    rows = []
    for name in PROGRAMS:
        for machine in machines:
            rows.append(compiled(name, machine))
            print(f"{name:16} {machine:8} {rows[-1]['temp_bytes'] / 1e6:8.1f} MB  {met(rows[-1])}", flush=True)
    if args.json:
        targets.write(args.json, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
