"""What is held on the device and on the host over time: Monte-Carlo against n-step returns, on images (TimeRL Fig. 11).

    python examples/memory_over_time.py [--size 64] [--out memory-over-time.png]

REINFORCE with a small CNN; the two losses differ in one slice. Monte-Carlo returns have to wait for the end of the rollout:
the observations go to the host as they are made and come back block by block, or the actor acts every block again. With
n-step returns the learner follows n timesteps behind the actor, and what it has learned from is dropped. Nothing is run:
the figure is the compiler's estimate, and `--measure` adds XLA's own number of temporary bytes.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp

import rlfx

ACTIONS, STEPS = 4, 8


def convolve(x, kernel):
    """A convolution with stride 2 of one image [C, H, W]."""
    numbers = ("NCHW", "OIHW", "NCHW")
    return jax.lax.conv_general_dilated(x[None], kernel, (2, 2), "SAME", dimension_numbers=numbers)[0]


def init(key, size):
    shapes = {"c1": (8, 3, 3, 3), "c2": (16, 8, 3, 3), "out": (16 * (size // 4) ** 2, ACTIONS)}
    keys = jax.random.split(key, len(shapes))
    return {name: 0.1 * jax.random.normal(k, s) for k, (name, s) in zip(keys, shapes.items(), strict=True)}


def reinforce(params, obs, t, returns):
    hidden = jax.nn.relu(convolve(jax.nn.relu(convolve(obs, params["c1"])), params["c2"]))
    log_probs = jax.nn.log_softmax(hidden.reshape(-1) @ params["out"])
    action = jax.random.categorical(t.key_for("action"), log_probs)
    noise = jax.random.uniform(t.key_for("env"), obs.shape[:1])
    following = jax.lax.stop_gradient(0.9 * jnp.roll(obs, 1, axis=2) + 0.1 * noise[:, None, None] + 0.01 * action)
    reward = rlfx.series(following[0, 0, 0])
    return -log_probs[action] * jax.lax.stop_gradient(returns(reward, t)), following


def discounted(rewards):
    return rlfx.discounted_sum(rewards, jnp.full_like(rewards, 0.99))


def monte_carlo(params, obs, t):
    return reinforce(params, obs, t, lambda reward, t: discounted(reward[t:]))


def n_step(params, obs, t):
    return reinforce(params, obs, t, lambda reward, t: discounted(reward[t : t + STEPS]))


def plans(size, length, batch):
    """What is drawn: a title, the program, and how it is compiled."""
    stacked = 4 * 3 * size * size * length * batch
    return {
        "Monte-Carlo: wait, offload, fetch": (monte_carlo, {"plan": rlfx.Plan("blocks", 8, offload=stacked)}),
        "Monte-Carlo, a budget on one memory: act again": (monte_carlo, {"memory_budget": stacked // 2}),
        f"{STEPS}-step: learn behind the actor, and drop": (n_step, {"memory_budget": stacked // 2}),
    }


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--measure", action="store_true", help="compile, too, for XLA's number of bytes")
    parser.add_argument("--out", help="a file for the figure")
    args = parser.parse_args(argv)
    drawn = plans(args.size, args.length, args.batch)
    params, obs = init(jax.random.key(0), args.size), jnp.zeros((args.batch, 3, args.size, args.size))
    explained = {}
    for title, (program, options) in drawn.items():
        fn = rlfx.compile(program, length=args.length, batch=args.batch, **options)
        found = explained[title] = fn.explain(params, obs, measure=args.measure)
        device, host = found.timeline.peak_device / 2**20, found.timeline.peak_host / 2**20
        print(f"{title}: {found.plan}\n  at most {device:.1f} MiB on the device, {host:.1f} MiB on the host")
    if args.out:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(len(explained), 1, figsize=(9, 9), sharex=True)
        for axis, (title, found) in zip(axes, explained.items(), strict=True):
            found.plot_memory(axis)
            axis.set_title(title, fontsize=9)
        figure.tight_layout()
        figure.savefig(args.out, dpi=110)
    return explained


if __name__ == "__main__":
    main()
