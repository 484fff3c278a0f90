"""What the composed examples share: a system that trains on two devices of the host, as a command."""

import argparse

import jax

import rlfx.envs
from rlfx.place import hardware, pearl


def use_two_devices():
    """Before the first computation: two devices of the host, whose kernels run in the threads that drive them."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def train(name, system, greedy, *, iterations, shown, every, argv=None):
    """Measure the parts on each device, decide which runs where, train, and evaluate ``greedy``.

    Args:
      shown: a metric, printed after ``every`` so many iterations.
    """
    parser = argparse.ArgumentParser(description=name)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=iterations)
    args = parser.parse_args(argv)

    init_key, key, test_key = jax.random.split(jax.random.key(args.seed), 3)
    state = system.init(init_key)
    devices = jax.devices()[:2]
    composition = pearl.composed(system, state, devices, hardware.measured(devices).bandwidth)
    print(*(f"{part} on {devices[d]}" for part, d in composition._asdict().items() if isinstance(d, int)), sep=", ")

    def show(call):
        if call.metrics is not None and call.iteration % every == 0:
            print(f"{call.iteration * system.collected:,} timesteps: {shown} {call.metrics[shown]:.4f}")

    state, report = pearl.run(
        system, state, key, composition=composition, devices=devices, iterations=args.iterations, after=show
    )
    print(report.explain())
    weights = jax.device_put(system.weights(state.learner), devices[0])
    found = rlfx.envs.evaluate(system.env, greedy, weights, test_key, 100)
    print(f"mean return of 100 greedy episodes: {found.mean_return:.1f}")
    return state, report
