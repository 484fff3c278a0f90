"""Which machine should I rent? One update, simulated on machines that are not here.

    python examples/which_machine.py

Notice that nothing is computed: arguments are shapes, the machines' rates are those of `rlfx.target`, and the search over
assignments is the one that `assign_stages` does before it runs anything. Prices are yours to fill in. Durations are a roofline of
whole stages (the peak rates of a machine, which no program reaches): they rank machines, and are no forecast of seconds.
"""

import argparse

import jax
import placed_ensemble
from placed_ensemble import transitions, update

import rlfx
from rlfx.place import hardware
from rlfx.place.methods import solve
from rlfx.place.stages import staged, staged_problem, whole

MACHINES = {  # name: (target, devices, bytes per second between two of them, dollars an hour: an assumption)
    "one T4": ("t4", 1, 10e9, 0.4),
    "four T4": ("t4", 4, 10e9, 1.6),
    "one A100": ("a100", 1, 300e9, 1.8),
    "four A100": ("a100", 4, 300e9, 7.2),
    "one H100": ("h100", 1, 450e9, 3.0),
    "two H100": ("h100", 2, 450e9, 6.0),
}


def machine(name, devices, bandwidth):
    """``rlfx.target(name)``, so many times, as the simulator sees it."""
    target = rlfx.target(name)
    return hardware.uniform(
        devices, flops=target.rates.flops, memory_rate=target.rates.bandwidth, memory=float(target.room.memory),
        bandwidth=bandwidth, overhead=target.rates.overhead, name=name,
    )  # fmt: skip


def predicted(shapes, name, devices, bandwidth, budget=256):
    """Seconds of an update, and on how many devices it is fastest."""
    rented = machine(name, devices, bandwidth)
    graph = staged(update, *shapes, carry=1, devices=devices)
    alone = float(staged_problem(whole(graph), rented).one_device().min())
    if devices == 1:
        return alone, 1
    found = solve(staged_problem(graph, rented), "polish", jax.random.key(0), budget)
    return min((alone, 1), (float(found.cost), len(set(found.assignment.device.tolist()))))


def main(argv=None):
    parser = argparse.ArgumentParser(description="machines for an ensemble of critics, simulated")
    parser.add_argument("--critics", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8192)
    args = parser.parse_args(argv)
    shapes = jax.eval_shape(
        lambda key: (placed_ensemble.init(key, args.critics, args.hidden), transitions(key, args.batch), key), jax.random.key(0)
    )
    rows = {}
    print(f"{'machine':<12} {'ms an update':>12} {'devices used':>12} {'dollars a million updates':>26}")
    for name, (target, devices, bandwidth, price) in MACHINES.items():
        seconds, used = predicted(shapes, target, devices, bandwidth)
        rows[name] = (seconds, used, seconds * 1e6 / 3600 * price)
        print(f"{name:<12} {1e3 * seconds:12.3f} {used:12} {rows[name][2]:26,.2f}")
    print(f"fastest: {min(rows, key=lambda n: rows[n][0])}; cheapest: {min(rows, key=lambda n: rows[n][2])}")
    return rows


if __name__ == "__main__":
    main()
