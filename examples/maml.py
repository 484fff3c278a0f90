"""MAML (Finn et al. 2017): parameters from which one update is enough to walk to a goal that the policy is not told.

Notice the three programs. `walk`, over t, walks from many places; `adapt`, over k, are the updates for one goal, each a gradient
of `walk`; `meta_step`, over i, has a parallel axis p of goals. The gradient of what the updates reach goes through them, so
through second derivatives of `walk`, which are through time; `rlfx.mean(..., over="p")` is over all goals.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from networks import init_mlp, mlp

import rlfx

LENGTH, PLACES, GOALS, UPDATES, RATE = 10, 8, 16, 1, 0.1
ANGLES = jnp.linspace(0.0, 2 * jnp.pi, PLACES, endpoint=False)
PLACES_AT = 0.3 * jnp.stack([jnp.cos(ANGLES), jnp.sin(ANGLES)], 1)
adam = optax.adam(1e-2)


def walk(params, x, t):
    """A step towards where the policy believes the goal to be; the loss is how far away that is."""
    policy, goal = params
    x += 0.1 * jnp.tanh(mlp(policy, x))
    return jnp.sum((x - goal) ** 2), x


loss_fn = rlfx.compile(walk, length=LENGTH, batch=PLACES)


def loss(policy, goal):
    return loss_fn((policy, goal), PLACES_AT)[0]


def adapt(goal, policy, k):
    """One update for one goal."""
    grads = jax.grad(loss)(policy, goal)
    return jax.tree.map(lambda w, g: w - RATE * g, policy, grads), None


def make_reached(updates=UPDATES):
    """``reached(policy, goal)``: the loss after the updates."""
    adapted = rlfx.unroll(adapt, length=updates, dim="k")
    return lambda policy, goal: loss(adapted(goal, policy)[0], goal)


def make_train(*, iterations, goals=GOALS, updates=UPDATES):
    """``train(None, learner, key) -> (learner, logs)``: a program over i and p."""
    reached = make_reached(updates)

    def meta_step(_, learner, i):
        policy, opt_state = learner
        goal = jax.random.uniform(i.key, (2,), minval=-0.5, maxval=0.5)
        after, grads = jax.value_and_grad(reached)(policy, goal)
        grads = jax.tree.map(lambda g: rlfx.mean(g, over="p"), grads)
        changes, opt_state = adam.update(grads, opt_state, policy)
        logs = {"before": rlfx.mean(loss(policy, goal), over="p"), "after": rlfx.mean(after, over="p"), "goal": goal}
        return (optax.apply_updates(policy, changes), opt_state), logs

    return rlfx.unroll(meta_step, length=iterations, dim="i", batch={"p": goals})


def init(key, hidden=32):
    policy = init_mlp(key, (2, hidden, 2), last_scale=0.1)
    return rlfx.Shared((policy, adam.init(policy)))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--hidden", type=int, default=32)
    args = parser.parse_args(argv)
    train = jax.jit(make_train(iterations=args.iterations))
    _, logs = train(None, init(jax.random.key(0), args.hidden), jax.random.key(1))
    for i in range(0, args.iterations, max(args.iterations // 6, 1)):
        print(
            f"meta-step {i}: loss {logs['before'][i, 0]:.3f} before, {logs['after'][i, 0]:.3f} after {UPDATES} update"
        )


if __name__ == "__main__":
    main()
