"""Double Q-learning of three steps on stored sequences, by networks with a layer of experts: two of them at each timestep, and
a penalty on the means of the gates over all timesteps keeps them all at work (Shazeer et al. 2017)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, CHOSEN, STEPS, GAMMA, EVEN = 24, 6, 2, 3, 0.99, 0.1


def params_of(key, hidden, width, experts):
    k = jax.random.split(key, 5)
    first, second = (
        {"w": jax.random.normal(k, (experts, i, o)) / np.float32(np.sqrt(i)), "b": jnp.zeros((experts, o))}
        for k, i, o in ((k[0], hidden, width), (k[1], width, hidden))
    )
    dense = {
        "in": c.dense(k[2], OBS, hidden),
        "gate": c.dense(k[3], hidden, experts),
        "q": c.dense(k[4], hidden, ACTIONS),
    }
    return dense | {"first": first, "second": second}


def gates_of(p, h):
    """For each expert its share, 0 but for the best."""
    top, which = jax.lax.top_k(c.linear(p["gate"], h), CHOSEN)
    return (jax.nn.one_hot(which, p["gate"]["b"].shape[0]) * jax.nn.softmax(top)[..., None]).sum(-2)


def uneven(importance):
    """The squared coefficient of variation."""
    return importance.var() / importance.mean() ** 2


def net(p, obs):
    """Values of the actions, and the gates."""
    h = jax.nn.relu(c.linear(p["in"], obs))
    gates = gates_of(p, h)
    expert = lambda first, second: c.linear(second, jax.nn.relu(c.linear(first, h)))  # noqa: E731
    mixed = jnp.einsum("...e,e...h->...h", gates, jax.vmap(expert)(p["first"], p["second"]))
    return c.linear(p["q"], h + mixed), gates


def huber(error):
    return jnp.where(jnp.abs(error) < 1.0, 0.5 * error**2, jnp.abs(error) - 0.5)


def program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data)[t]
    q, gates = net(p, x["obs"])
    following = rlfx.series(stop_gradient(net(target, x["obs"])[0][jnp.argmax(q)]), end=0.0)
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    aim = stop_gradient(rlfx.n_step_return(step, following[t + 1], gamma=GAMMA, n=STEPS))
    return huber(q[x["action"]] - aim) + EVEN * uneven(rlfx.mean(gates)), carry


# -- by hand: what the experts make of rows ``h[N, H]``, mixed


def mapped(p, h, gates):
    expert = lambda first, second: c.linear(second, jax.nn.relu(c.linear(first, h)))  # noqa: E731
    return jnp.einsum("...e,e...h->...h", gates, jax.vmap(expert)(p["first"], p["second"]))


def one_by_one(p, h, gates):
    total = jnp.zeros_like(h)
    for i in range(gates.shape[-1]):
        first, second = (jax.tree.map(lambda w: w[i], p[name]) for name in ("first", "second"))
        total += gates[..., i, None] * c.linear(second, jax.nn.relu(c.linear(first, h)))
    return total


def gated_inside(p, h, gates):
    """One expert after the other, whose second product is of what has been weighed."""
    total = gates @ p["second"]["b"]
    for i in range(gates.shape[-1]):
        z = jax.nn.relu(h @ p["first"]["w"][i] + p["first"]["b"][i])
        total += (gates[..., i, None] * z) @ p["second"]["w"][i]
    return total


def joined(p, h, gates):
    """Two products of all experts: what they hold is weighed between, so that the second adds them up."""
    hidden = h.shape[-1]
    z = jax.nn.relu(h @ jnp.moveaxis(p["first"]["w"], 0, 1).reshape(hidden, -1) + p["first"]["b"].reshape(-1))
    z = (z.reshape(*gates.shape, -1) * gates[..., None]).reshape(*h.shape[:-1], -1)
    return z @ p["second"]["w"].reshape(-1, hidden) + gates @ p["second"]["b"]


def features_first(p, h, gates):
    """The same with rows innermost."""
    experts, hidden, width = p["first"]["w"].shape
    first = jnp.swapaxes(p["first"]["w"], 1, 2).reshape(-1, hidden)
    z = jax.nn.relu(first @ h.T + p["first"]["b"].reshape(-1, 1)).reshape(experts, width, -1) * gates.T[:, None]
    return (p["second"]["w"].reshape(-1, hidden).T @ z.reshape(experts * width, -1) + p["second"]["b"].T @ gates.T).T


def batched(p, h, gates):
    """Products batched over experts, weighed between."""
    z = jax.nn.relu(jnp.einsum("nh,ehf->enf", h, p["first"]["w"]) + p["first"]["b"][:, None])
    return jnp.einsum("enf,efh->nh", z * gates.T[..., None], p["second"]["w"]) + gates @ p["second"]["b"]


def best_two(x):
    """`jax.lax.top_k` by two maxima, which XLA:CPU does not sort for."""
    best = jnp.argmax(x, -1)
    others = jnp.where(best[..., None] == jnp.arange(x.shape[-1]), -jnp.inf, x)
    return jnp.stack([best, jnp.argmax(others, -1)], -1)


def gates_by_maxima(p, h):
    logits = c.linear(p["gate"], h)
    chosen = (best_two(stop_gradient(logits))[..., None] == jnp.arange(logits.shape[-1])).any(-2)
    return jax.nn.softmax(jnp.where(chosen, logits, -jnp.inf))


@jax.custom_vjp
def gathered(x, there, back):
    """``x[there]``, zero beyond its end; ``back`` says where each row of x went, so that the derivative is a gather, too."""
    return jnp.concatenate([x, jnp.zeros_like(x[:1])])[there]


gathered.defvjp(
    lambda x, there, back: (gathered(x, there, back), (there, back)),
    lambda given, by: (gathered(by, given[1], given[0]), None, None),
)


def sparse(rows, again=False):
    """Only what is chosen: pairs of a row and its expert are brought to where their expert's are, each filled up to blocks of
    ``rows``."""

    def mix(p, h, gates):
        count, experts = gates.shape
        pairs, most = CHOSEN * count, CHOSEN * count // rows + experts
        which = best_two(gates)
        share, which = jnp.take_along_axis(gates, which, -1), which.reshape(-1)
        rank = jnp.cumsum(which[:, None] == jnp.arange(experts), 0)
        blocks = -(-rank[-1] // rows)
        ends = jnp.cumsum(blocks)
        place = (ends - blocks)[which] * rows + c.pick(rank, which) - 1
        source = jnp.full(most * rows, pairs).at[place].set(jnp.arange(pairs))
        of_block = jnp.minimum(jnp.searchsorted(ends, jnp.arange(most), side="right"), experts - 1)

        def block(_, x):
            i, h = x
            first, second = (jax.tree.map(lambda w: w[i], p[name]) for name in ("first", "second"))
            return None, c.linear(second, jax.nn.relu(c.linear(first, h)))

        body = jax.checkpoint(block, prevent_cse=False) if again else block
        given = gathered(jnp.repeat(h, CHOSEN, 0), source, place).reshape(most, rows, -1)
        made = jax.lax.scan(body, None, (of_block, given))[1].reshape(most * rows, -1)
        return (share[..., None] * gathered(made, place, source).reshape(count, CHOSEN, -1)).sum(1)

    return mix


def by_hand(length, batch, mix=mapped, flat=True, chunk=None, back=False, gates=gates_of):
    """``chunk``: timesteps of a block; ``back``: one loop backwards over blocks, what returns need of later ones in its carry."""

    def seen(p, obs):
        h = jax.nn.relu(c.linear(p["in"], obs))
        return h, gates(p, h)

    def evaluated(p, obs):
        h, found = seen(p, obs)
        return c.linear(p["q"], h + mix(p, h, found)), found

    def aims(following, reward, going, later):
        """Of a block, and of what is before it: returns of 0 to n - 1 steps, later[k] those of the timestep after it."""
        aim, first = following, []
        for k in range(STEPS):
            first.append(aim[0])
            aim = reward + going * c.shifted(aim, later[k])
        return aim, jnp.stack(first)

    def run(p, target, data):
        size = length * batch
        going = GAMMA * (1.0 - data["done"].astype(jnp.float32))
        none = jnp.zeros((STEPS, batch))

        def following(q, obs):
            return c.pick(evaluated(target, obs)[0], jnp.argmax(stop_gradient(q), -1))

        def error(q, action, aim):
            return huber(c.pick(q, action) - aim).sum() / size

        flatten = c.rows_of if flat else lambda x: x
        if chunk is None:
            aside_q = evaluated(target, flatten(data["obs"]))[0]

            def loss(p):
                q, gates = evaluated(p, flatten(data["obs"]))
                next_value = c.pick(aside_q, jnp.argmax(stop_gradient(q), -1)).reshape(length, batch)
                aim, _ = aims(next_value, data["reward"], going, none)
                importance = gates.reshape(size, -1).mean(0)
                return error(q, flatten(data["action"]), flatten(aim)) + EVEN * uneven(importance)

            return jax.value_and_grad(loss)(p)

        importance = seen(p, c.rows_of(data["obs"]))[1].mean(0)
        penalty, slope = jax.value_and_grad(lambda x: EVEN * uneven(x))(importance)
        blocks = c.in_chunks((data["obs"], data["action"], data["reward"], going), chunk)

        def block_loss(p, obs, action, aim):
            q, gates = evaluated(p, obs)
            return error(q, action, aim) + (gates @ slope).sum() / size

        if back:

            def body(state, x):
                later, total = state
                obs, action, reward, going = x
                obs, action = c.rows_of((obs, action))
                (q, gates), through = jax.vjp(lambda p: evaluated(p, obs), p)
                aim, later = aims(following(q, obs).reshape(reward.shape), reward, going, later)
                found, by_q = jax.value_and_grad(error)(q, action, aim.reshape(-1))
                (grads,) = through((by_q, jnp.broadcast_to(slope / size, gates.shape)))
                return (later, jax.tree.map(jnp.add, total, (found, grads))), None

            start = none, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, p))
            found, grads = jax.lax.scan(body, start, blocks, reverse=True)[0][1]
            return found + penalty, grads

        made = jax.lax.map(
            lambda obs: following(evaluated(p, obs)[0], obs), c.rows_of(blocks[0]).reshape(-1, chunk * batch, OBS)
        )
        aim, _ = aims(made.reshape(length, batch), data["reward"], going, none)
        parts = c.in_chunks(c.rows_of((data["obs"], data["action"], aim)), chunk * batch)
        found, grads = c.summed_gradient(lambda p, part: block_loss(p, *part), p, parts)
        return found - slope @ importance + penalty, grads

    return run


def workload(length, batch, hidden, width, experts, chunk=4, rows=64):
    make = lambda **how: by_hand(length, batch, **how)  # noqa: E731
    back, maxima = {"chunk": chunk, "back": True}, {"gates": gates_by_maxima}
    one, long = back | {"chunk": 1}, back | {"chunk": 4 * chunk}
    forms = {
        "rlfx": c.learner_by_rlfx(program, length, batch),
        "plain": make(), "not flattened": make(flat=False), "one by one": make(mix=one_by_one),
        "weighed between": make(mix=gated_inside), "batched": make(mix=batched), "joined": make(mix=joined),
        "features first": make(mix=features_first),
        f"joined, blocks of {chunk}": make(mix=joined, chunk=chunk), f"joined, back by {chunk}": make(mix=joined, **back),
        f"one by one, back by {chunk}": make(mix=one_by_one, **back),
        f"one by one, back by {chunk}, two maxima": make(mix=one_by_one, **back, **maxima),
        f"weighed between, back by {chunk}": make(mix=gated_inside, **back),
        f"features first, back by {chunk}": make(mix=features_first, **back), "joined, back by 1": make(mix=joined, **one),
        f"chosen alone, by {rows}": make(mix=sparse(rows)),
        f"chosen alone, by {rows}, two maxima": make(mix=sparse(rows), **maxima),
        f"chosen alone, by {rows}, again, two maxima": make(mix=sparse(rows, again=True), **maxima),
        f"chosen alone, by {2 * rows}, two maxima": make(mix=sparse(2 * rows), **maxima),
        f"chosen alone, by {2 * rows}, again, two maxima": make(mix=sparse(2 * rows, again=True), **maxima),
        f"chosen alone, by {rows}, back by {4 * chunk}, two maxima": make(mix=sparse(rows), **maxima, **long),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jax.random.randint(k[1], size, 0, ACTIONS),
        "reward": jax.random.normal(k[2], size), "done": (jax.random.uniform(k[3], size) < 0.03).at[-1].set(True),
    }  # fmt: skip
    p, target = (params_of(k, hidden, width, experts) for k in k[4:])
    return Workload(forms, (p, target, data), tolerance=5e-6)
