"""A learned learning rate: the gradient of what 64 updates reach, with respect to their rate (a meta-gradient).

Notice `adapt`, a program over k that calls `loss_fn`, a program over t, and its gradient. The gradient of `reached` goes through
all updates, and so through second derivatives of `loss_fn`, which are through time. `jax.checkpoint` around the update keeps the
parameters before each update alone, and acts again: what acting keeps is there for one update at a time.
"""

import argparse

import jax
import jax.numpy as jnp

import rlfx

T, B, HIDDEN, UPDATES = 32, 16, 32, 64
KEY = jax.random.key(0)


def steer(params, x, t):
    """Bring x to 0 by small noisy steps; the gradient goes through them."""
    action = jnp.tanh(params["in"] * x + params["bias"]) @ params["out"]
    x += 0.1 * action + 0.03 * jax.random.normal(t.key)
    return x**2, x


loss_fn = rlfx.compile(steer, length=T, batch=B)


def init(key=KEY):
    first, last = jax.random.split(key)
    scale = lambda key: 0.1 * jax.random.normal(key, (HIDDEN,))  # noqa: E731
    return {"in": scale(first), "bias": jnp.zeros(HIDDEN), "out": scale(last)}, jnp.linspace(-1, 1, B)


def update(rate, params, x, key):
    grads = jax.grad(lambda params: loss_fn(params, x, key)[0])(params)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def make_reached(updates=UPDATES, checkpoint=True):
    """``reached(rate, key)``: the loss after ``updates`` updates."""
    params, x = init()
    step = jax.checkpoint(update) if checkpoint else update

    def adapt(rate, params, k):
        return step(rate, params, x, k.key), None

    run = rlfx.unroll(adapt, length=updates, dim="k")

    def reached(rate, key=KEY):
        adapted, _ = run(rate, params, key)
        return loss_fn(adapted, x, jax.random.fold_in(key, updates))[0]

    return reached


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)
    gradient = jax.jit(jax.value_and_grad(make_reached(args.updates)))
    rate = jnp.float32(0.01)
    for n in range(args.steps):
        value, slope = gradient(rate, jax.random.fold_in(KEY, n))
        rate *= jnp.exp(-0.1 * jnp.sign(slope))
        print(f"rate {rate:.4f}: {value:.4f} after {args.updates} updates")


if __name__ == "__main__":
    main()
