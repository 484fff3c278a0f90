"""An actor-critic in an ensemble of models, as MBPO (Janner et al. 2019) imagines and SVG (Heess et al. 2015) learns: every
member of a learnt ensemble is rolled out from the same stored states, and the policy's gradient goes through its predictions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing

OBS, ACTIONS, GAMMA, LAMBDA, ALPHA = 17, 6, 0.99, 0.95, 0.05
swish, relu = jax.nn.swish, jax.nn.relu


def params_of(key, members, hidden, model):
    k = jax.random.split(key, 3)
    p = {"actor": c.mlp_params(k[0], (OBS, hidden, hidden, 2 * ACTIONS)), "critic": c.mlp_params(k[1], (OBS, hidden, hidden, 1))}
    of_one = lambda key: c.mlp_params(key, (OBS + ACTIONS, model, model, 2 * (OBS + 1)))  # noqa: E731
    return p, jax.vmap(of_one)(jax.random.split(k[2], members))


def noised(made, noise):
    """A squashed normal's action and its log-probability, of what the actor made."""
    mean, log_std = jnp.split(made, 2, -1)
    log_std = jnp.clip(log_std, -5.0, 2.0)
    u = mean + jnp.exp(log_std) * noise
    log_prob = -0.5 * noise**2 - log_std - 0.919 - 2.0 * (jnp.log(2.0) - u - jax.nn.softplus(-2.0 * u))
    return jnp.tanh(u), log_prob.sum(-1)


def predicted(made, s, noise):
    """The next state and the reward, of what a model made; its deviations are bounded softly."""
    mean, log_std = jnp.split(made, 2, -1)
    log_std = 0.5 - jax.nn.softplus(0.5 - log_std)
    log_std = -5.0 + jax.nn.softplus(log_std + 5.0)
    drawn = mean + jnp.exp(log_std) * noise
    return s + 0.2 * drawn[..., :OBS], drawn[..., OBS]


def moved(model, s, action, noise):
    return predicted(c.mlp(model, jnp.concatenate([s, action], -1), swish), s, noise)


def judged(critic, s):
    return c.mlp(critic, s, relu)[..., 0]


def program(params, s, t):
    p, model = params
    made = c.mlp(p["actor"], s, relu)
    action, log_prob = noised(made, jax.random.normal(t.key_for("action"), (ACTIONS,)))
    after, reward = moved(model, s, action, jax.random.normal(t.key_for("model"), (OBS + 1,)))
    value = rlfx.series(judged(stop_gradient(p["critic"]), s))
    goes_on = jnp.zeros((), bool)
    returns = rlfx.lambda_return(c.Step(reward, goes_on, goes_on), value[t + 1], gamma=GAMMA, lam=LAMBDA)
    critic = 0.5 * (judged(p["critic"], stop_gradient(s)) - stop_gradient(returns)) ** 2
    return critic + ALPHA * log_prob - returns, after


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, models, states, key):
        def loss(p):
            of_one = lambda model, key: loss_fn((p, model), states, key)  # noqa: E731
            found, (after, _) = jax.vmap(of_one)(models, jax.random.split(key, len(models[0]["b"])))
            return found.mean(), after

        (found, after), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return found, grads, after

    return run


# -- by hand: the models of members, on rows ``x[E, N, OBS + ACTIONS]``


def mapped(models, x):
    return jax.vmap(lambda model, x: c.mlp(model, x, swish))(models, x)


def member(models, i):
    return jax.tree.map(lambda w: w[i], models)


def one_by_one(models, x):
    return jnp.stack([c.mlp(member(models, i), y, swish) for i, y in enumerate(x)])


def products(models, x):
    """Products of members at once, and the rest of all rows."""
    for layer in models[:-1]:
        x = swish(jax.lax.batch_matmul(x, layer["w"]) + layer["b"][:, None])
    return jax.lax.batch_matmul(x, models[-1]["w"]) + models[-1]["b"][:, None]


def split(models, x):
    """What is not concatenated needs no copy."""
    s, action = x
    first, *rest = models
    made = []
    for i in range(len(s)):
        wide = s[i] @ first["w"][i, :OBS] + action[i] @ first["w"][i, OBS:] + first["b"][i]
        made.append(c.mlp(member(rest, i), swish(wide), swish))
    return jnp.stack(made)


# -- by hand: the loss of trajectories, ``[H, ..., N]``


def returned(reward, value, last):
    """Lambda-returns, through which the gradient goes."""
    following = c.shifted(value, last)

    def body(after, x):
        after = x[0] + GAMMA * ((1.0 - LAMBDA) * x[1] + LAMBDA * after)
        return after, after

    return jax.lax.scan(body, last, (reward, following), reverse=True)[1]


def by_lags(reward, value, last):
    """The same without a loop: sums over what follows, by one product with discounts of all pairs of timesteps."""
    length = len(reward)
    following = c.shifted(value, last)
    delta = reward + GAMMA * (1.0 - LAMBDA) * following
    lags = jnp.arange(length)[None] - jnp.arange(length)[:, None]
    weights = jnp.where(lags >= 0, (GAMMA * LAMBDA) ** jnp.maximum(lags, 0), 0.0)
    ends = (GAMMA * LAMBDA) ** (length - jnp.arange(length))
    flat = weights @ delta.reshape(length, -1) + ends[:, None] * last.reshape(-1)
    return flat.reshape(reward.shape)


def total(p, states, after, log_prob, reward, returned=returned):
    """Both losses, summed over trajectories; the critic looks at all states at once."""
    rows = jnp.concatenate([states, after[None]])
    value = judged(stop_gradient(p["critic"]), rows.reshape(-1, OBS)).reshape(rows.shape[:-1])
    returns = returned(reward, value[:-1], value[-1])
    told = judged(p["critic"], stop_gradient(states).reshape(-1, OBS)).reshape(reward.shape)
    return (0.5 * (told - stop_gradient(returns)) ** 2 + ALPHA * log_prob - returns).sum()


def drawn(keys, batch, length, ahead):
    """``(given, draw)``: what a loop draws of, and how; noise of actions and of models, ``[E, N, ...]``."""
    keys = jax.vmap(lambda key: jnp.stack(c.streams(key, batch, "action", "model")))(keys)

    def draw(t):
        now = jax.vmap(jax.vmap(lambda k: c.at(k, t)))(keys)
        normal = lambda keys, n: jax.vmap(jax.vmap(lambda k: jax.random.normal(k, (n,))))(keys)  # noqa: E731
        return normal(now[:, 0], ACTIONS), normal(now[:, 1], OBS + 1)

    times = jnp.arange(length)
    return (jax.vmap(draw)(times), lambda x: x) if ahead else (times, draw)


def by_hand(length, batch, members, net=mapped, flat=True, ahead=True, unroll=1, again=False, after_loop=False, **how):
    """``flat``: the actor's rows are of all members; ``after_loop``: gradients of its weights are taken of all timesteps at
    once; ``again``: the gradient computes each timestep again."""

    def rolled(actor, models, states, noise, probes=None):
        """``probes`` are zeros ``[H, N, ...]`` for each layer: their gradients are those of its sums."""
        given, draw = noise

        def act(x, probes):
            if probes is None:
                return c.mlp(actor, x, relu), None
            inputs = []
            for i, layer in enumerate(actor):
                inputs.append(x)
                x = c.linear(layer, x) + probes[i]
                x = relu(x) if i < len(actor) - 1 else x
            return x, inputs

        def body(s, x):
            given, probes = x
            of_action, of_model = draw(given)
            made, inputs = act(s.reshape(-1, OBS) if flat else s, probes)
            action, log_prob = noised(made.reshape(*s.shape[:-1], -1), of_action)
            pair = (s, action) if net is split else jnp.concatenate([s, action], -1)
            after, reward = predicted(net(models, pair), s, of_model)
            return after, ((s, log_prob, reward), inputs)

        body = jax.checkpoint(body, prevent_cse=False) if again else body
        start = jnp.broadcast_to(states, (members, *states.shape))
        after, (made, inputs) = jax.lax.scan(body, start, (given, probes), unroll=unroll)
        return (after, *made), inputs

    def run(p, models, states, key):
        noise = drawn(jax.random.split(key, members) if key.ndim == 0 else key, batch, length, ahead)
        count = length * batch * members

        def loss(p, probes=None):
            actor = stop_gradient(p["actor"]) if after_loop else p["actor"]
            (after, states_then, log_prob, reward), inputs = rolled(actor, models, states, noise, probes)
            return total(p, states_then, after, log_prob, reward, **how) / count, (after, inputs)

        if not after_loop:
            (found, (after, _)), grads = jax.value_and_grad(loss, has_aux=True)(p)
            return found, grads, after
        probes = [jnp.zeros((length, members * batch, len(layer["b"]))) for layer in p["actor"]]
        (found, (after, inputs)), (grads, by) = jax.value_and_grad(loss, (0, 1), has_aux=True)(p, probes)
        weights = [{"w": c.rows_of(x).T @ c.rows_of(g), "b": g.sum((0, 1))} for x, g in zip(inputs, by, strict=True)]
        return found, grads | {"actor": weights}, after

    return run


def member_by_member(length, batch, members, at_once=True, **how):
    """The whole loss of every member, under `jax.vmap` or one after the other."""
    one = by_hand(length, batch, 1, one_by_one, **how)

    def run(p, models, states, key):
        def of_one(x):
            return one(p, jax.tree.map(lambda w: w[None], x[0]), states, x[1][None])

        given = models, jax.random.split(key, members)
        if at_once:
            found, grads, after = jax.vmap(of_one)(given)
        else:
            found, grads, after = jax.lax.map(of_one, given)
        return found.mean(), jax.tree.map(lambda g: g.mean(0), grads), after[:, 0]

    return run


def features_first(length, batch, members, unroll=1):
    """States ``[OBS, E * N]``: rows of all members are innermost."""
    act = lambda layer, x: layer["w"].T @ x + layer["b"][:, None]  # noqa: E731

    def net(layers, x, activation):
        for layer in layers[:-1]:
            x = activation(act(layer, x))
        return act(layers[-1], x)

    def run(p, models, states, key):
        given, _ = drawn(jax.random.split(key, members), batch, length, ahead=True)
        given = jax.tree.map(lambda x: jnp.swapaxes(x.reshape(length, -1, x.shape[-1]), 1, 2), given)

        def loss(p):
            def body(s, given):
                of_action, of_model = given
                mean, log_std = jnp.split(net(p["actor"], s, relu), 2)
                log_std = jnp.clip(log_std, -5.0, 2.0)
                u = mean + jnp.exp(log_std) * of_action
                log_prob = -0.5 * of_action**2 - log_std - 0.919 - 2.0 * (jnp.log(2.0) - u - jax.nn.softplus(-2.0 * u))
                pairs = jnp.split(jnp.concatenate([s, jnp.tanh(u)]), members, 1)
                made = jnp.concatenate([net(member(models, i), x, swish) for i, x in enumerate(pairs)], 1)
                after, reward = predicted(made.T, s.T, of_model.T)
                return after.T, (s, log_prob.sum(0), reward)

            start = jnp.tile(states.T, (1, members))
            after, (seen, log_prob, reward) = jax.lax.scan(body, start, given, unroll=unroll)
            rows = jnp.moveaxis(jnp.concatenate([seen, after[None]]), 1, 0)
            judge = lambda critic, x: net(critic, x.reshape(OBS, -1), relu).reshape(x.shape[1:])  # noqa: E731
            value = judge(stop_gradient(p["critic"]), rows)
            returns = returned(reward, value[:-1], value[-1])
            told = judge(p["critic"], stop_gradient(rows[:, :-1]))
            found = 0.5 * (told - stop_gradient(returns)) ** 2 + ALPHA * log_prob - returns
            return found.mean(), after.T.reshape(members, batch, OBS)

        (found, after), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return found, grads, after

    return run


def workload(length, batch, members, hidden, model):
    make = lambda net=mapped, **how: by_hand(length, batch, members, net, **how)  # noqa: E731
    by_one = lambda **how: member_by_member(length, batch, members, **how)  # noqa: E731
    late, after, four, lags = {"ahead": False}, {"after_loop": True}, {"unroll": 4}, {"returned": by_lags}
    first = lambda **how: features_first(length, batch, members, **how)  # noqa: E731
    forms = {
        "rlfx": by_rlfx(length, batch), "plain": by_one(flat=False, ahead=False), "member after member": by_one(at_once=False),
        "members in the loop": make(**late), "drawn ahead": make(), "returns by lags": make(**lags),
        "members one by one": make(one_by_one), "members by products": make(products), "split": make(split),
        "again": make(again=True), "weights after": make(one_by_one, **after), "weights after, split": make(split, **after),
        "weights after, member after member": by_one(at_once=False, **after), "features first": first(),
        "features first, threefry unrolled": first(), "features first, unrolled by 4": first(**four),
        "members by products, threefry unrolled": make(products),
        "weights after, members by products, threefry unrolled": make(products, **after, **lags),
        "member after member, threefry unrolled": by_one(at_once=False),
        "member after member, drawn late, threefry unrolled": by_one(at_once=False, **late),
        "weights after, member after member, threefry unrolled": by_one(at_once=False, **after),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0))
    given = *params_of(k[0], members, hidden, model), jax.random.normal(k[1], (batch, OBS))
    return drawing(forms, given, tolerance=2e-5)
