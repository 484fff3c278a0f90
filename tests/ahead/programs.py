"""Small programs whose compilations are recorded, and of which it is known by hand what they launch."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import rlfx
import rlfx.envs

STEPS, ROUNDS = 50, 7
S = jax.ShapeDtypeStruct


def loops(x, w):
    """A loop of 50 iterations forward, and one backward."""

    def value(w):
        def body(c, r):
            c = jnp.tanh(c @ w) + r
            return c, c

        return jax.lax.scan(body, jnp.zeros(x.shape[1:]), x)[1].sum()

    return jax.grad(value)(w)


def open_ended(x):
    """A loop that ends when data says, with one of seven iterations inside, and a conditional before."""

    def body(x):
        return jax.lax.fori_loop(0, ROUNDS, lambda i, x: jnp.sin(x) @ x, x)

    x = jax.lax.cond(x[0, 0] > 0, lambda x: jnp.sort(x, axis=0) @ x, lambda x: x, x)
    return jax.lax.while_loop(lambda x: jnp.sum(x) > 1.0, body, x)


def split(mesh):
    """A sum over the devices once, and one in each of seven iterations."""

    def on_one(x):
        def body(i, c):
            return c + jax.lax.psum(jnp.tanh(x).sum(0) + c, "b")

        c = jax.lax.fori_loop(0, ROUNDS, body, jnp.zeros(x.shape[1]))
        return jax.lax.psum(c @ c, "b")

    over = {"in_specs": PartitionSpec("b"), "out_specs": PartitionSpec(), "check_vma": False}
    return jax.shard_map(on_one, mesh=mesh, **over)


def split_shape(mesh):
    return S((64, 256), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("b")))


def hosted(x):
    """Rows computed one by one go to the host's memory, and come back one by one."""
    host = jax.memory.Space.Host

    def forth(c, row):
        c = jnp.tanh(c + row)
        return c, jax.device_put(c, host)

    def back(c, row):
        return jnp.sin(c) * jax.device_put(row, jax.memory.Space.Device), None

    last, kept = jax.lax.scan(forth, jnp.zeros(x.shape[1]), x)
    return jax.lax.scan(back, last, kept, reverse=True)[0]


LOOPS = (S((STEPS, 512, 64), jnp.float32), S((64, 64), jnp.float32))
OPEN_ENDED = (S((128, 128), jnp.float32),)
HOSTED = (S((STEPS, 4096), jnp.float32),)


# -- PPO over a mesh: one epoch, and epochs of shuffled minibatches

BATCH, UNITS, OBSERVED, PPO_STEPS, EPOCHS, MINIBATCHES = 512, 64, 16, 96, 2, 4


def _ppo_loss(params, obs, action, old, advantage, target):
    hidden = jnp.tanh(obs @ params["body"])
    log_probs, value = jax.nn.log_softmax(hidden @ params["actor"]), hidden @ params["critic"]
    ratio = jnp.exp(log_probs[action] - old)
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    return (value - target) ** 2 - surrogate + 0.01 * jnp.sum(jnp.exp(log_probs) * log_probs)


def _acted(params, obs, t):
    """One timestep of a small system: its successor, and what a learner needs."""
    hidden = jnp.tanh(obs @ params["body"])
    log_probs, value = jax.nn.log_softmax(hidden @ params["actor"]), hidden @ params["critic"]
    action = jax.random.categorical(t.key_for("action"), log_probs)
    following = jnp.tanh(
        0.9 * obs + 0.1 * jax.random.normal(t.key_for("env"), obs.shape) + 0.1 * action.astype(jnp.float32)
    )
    terminated = following[0] > 0.9
    step = rlfx.envs.Step(-jnp.mean(following**2), terminated, jnp.bool_(False), following)
    next_value = rlfx.next_value(lambda obs: jnp.tanh(obs @ params["body"]) @ params["critic"], step, value)
    advantage = jax.lax.stop_gradient(rlfx.gae(step, value, next_value, gamma=0.99, lam=0.95))
    sample = obs, action, log_probs[action], advantage, advantage + jax.lax.stop_gradient(value)
    return jax.lax.stop_gradient(jnp.where(terminated, 0.0, following)), sample


def one_epoch(params, obs, t):
    """PPO's loss at one timestep, with advantages normalised over all of them."""
    following, (obs, action, old, advantage, target) = _acted(params, obs, t)
    scaled = (advantage - rlfx.mean(advantage)) / (rlfx.std(advantage) + 1e-8)
    return _ppo_loss(params, obs, action, jax.lax.stop_gradient(old), scaled, target), following


def ppo_params(sharding=None):
    """Shapes of the weights; of the hidden layer perhaps split."""
    return {
        "body": S((OBSERVED, UNITS), jnp.float32, sharding=sharding),
        "actor": S((UNITS, 4), jnp.float32),
        "critic": S((UNITS,), jnp.float32),
    }


def ppo_gradient(batch, mesh=None, weights=None):
    """``(fn, shapes)`` of the update of one epoch, environments split over axis "b" of a mesh, weights as they say."""
    loss_fn = rlfx.compile(one_epoch, length=PPO_STEPS, batch=batch, mesh=mesh)

    def update(params, obs, key):
        (loss, (obs, _)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, obs, key)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), obs, loss

    return update, (ppo_params(weights), *_observed(batch, mesh))


def ppo_minibatches(batch, mesh=None):
    """``(fn, shapes)`` of an update of 2 epochs of 4 minibatches over a mesh."""
    rollout = rlfx.unroll(_acted, length=PPO_STEPS, batch=batch, mesh=mesh)

    def learn(params, sample):
        loss = lambda params: jax.vmap(lambda *x: _ppo_loss(params, *x))(*sample).mean()  # noqa: E731
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, jax.grad(loss)(params)), None

    def update(params, obs, key):
        act_key, shuffle_key = jax.random.split(key)
        obs, samples = rollout(params, obs, act_key)
        params, _ = rlfx.minibatch_epochs(
            learn, params, samples, epochs=EPOCHS, minibatches=MINIBATCHES, key=shuffle_key, mesh=mesh
        )
        return params, obs

    return update, (ppo_params(), *_observed(batch, mesh))


def _observed(batch, mesh):
    split = None if mesh is None else NamedSharding(mesh, PartitionSpec("b"))
    return S((batch, OBSERVED), jnp.float32, sharding=split), jax.eval_shape(lambda: jax.random.key(0))
