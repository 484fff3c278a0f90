"""Backpropagation through time: a GRU that must recall what it saw `DELAY` timesteps ago.

Notice two ways to write the same recurrence. `recall_carry` returns the hidden state as the next carry, as a scan body
would; `recall_solve` defines it by an equation, `h[t] = gru(h[t - 1], x[t])`, and needs no carry. The gradients are
equal: rlfx differentiates through time either way. A third program truncates backpropagation at every `n`-th timestep
by one condition on `t`.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from networks import init_mlp, mlp
from recurrent_ppo import gru, init_gru

import rlfx

SYMBOLS, DELAY, HIDDEN = 4, 6, 48


def recall_loss(params, h, x, t):
    """Cross-entropy of the symbol ``DELAY`` timesteps ago (none is asked for before)."""
    wanted = x[rlfx.maximum(t - DELAY, 0)]
    log_probs = jax.nn.log_softmax(mlp(params["head"], h))
    return jnp.where(t >= DELAY, -log_probs[wanted], 0.0)


def recall_carry(params, h, t):
    params, symbols = params
    x = rlfx.inputs(symbols)
    h = gru(params["gru"], h, jax.nn.one_hot(x[t], SYMBOLS))
    return recall_loss(params, h, x, t), h


def recall_solve(params, h0, t):
    params, symbols = params
    x = rlfx.inputs(symbols)
    h = rlfx.solve(lambda h: gru(params["gru"], h[t - 1], jax.nn.one_hot(x[t], SYMBOLS)), start=jnp.zeros(HIDDEN))
    return recall_loss(params, h, x, t), h0


def truncated(n):
    """Backpropagation stops at every ``n``-th timestep; the state goes on."""

    def recall_truncated(params, h, t):
        return recall_carry(params, jnp.where(t % n == 0, jax.lax.stop_gradient(h), h), t)

    return recall_truncated


def init_params(key):
    gru_key, head_key = jax.random.split(key)
    return {"gru": init_gru(gru_key, SYMBOLS, HIDDEN), "head": init_mlp(head_key, (HIDDEN, SYMBOLS))}


def train(program=recall_carry, *, length=32, batch=64, updates=1000, seed=0):
    """The loss at each update, ``float32[updates]``."""
    loss_fn = rlfx.compile(program, length=length, batch=batch, mesh=rlfx.use_all_cores(batch=batch))
    optimizer = optax.adam(3e-3)
    params_key, data_key = jax.random.split(jax.random.key(seed))
    h = None if program is recall_solve else jnp.zeros((batch, HIDDEN))

    def update(learner, key):
        params, opt_state = learner
        symbols = jax.random.randint(key, (length, batch), 0, SYMBOLS)
        loss, grads = jax.value_and_grad(lambda p: loss_fn((p, symbols), h)[0])(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    params = init_params(params_key)
    train = jax.jit(lambda learner, keys: jax.lax.scan(update, learner, keys))
    return train((params, optimizer.init(params)), jax.random.split(data_key, updates))[1]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=1000)
    args = parser.parse_args(argv)
    for name, program in (("carry", recall_carry), ("solve", recall_solve), ("truncated to 4", truncated(4))):
        losses = train(program, updates=args.updates)
        print(f"{name}: loss {losses[0]:.3f} -> {losses[-10:].mean():.3f}")


if __name__ == "__main__":
    main()
