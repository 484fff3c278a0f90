"""Stochastic ensemble value expansion by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_ninth.expectile import scalar
from benchmarks.untuned.sealed_tenth import expansion
from benchmarks.untuned.sealed_tenth.expansion import (
    ACTIONS,
    CRITICS,
    GAMMA,
    HORIZON,
    MODELS,
    OBS,
    acts,
    ensemble,
    expanded,
    model_loss,
    moved,
    params_of,
    relu,
    weighed,
)  # fmt: skip


def one_by_one(members, x):
    """Outputs ``[members, N, ...]`` of rows."""
    return jnp.stack([c.mlp(c.member(members, i), x, relu) for i in range(len(members[0]["w"]))])


def by_vmap(members, x):
    return jax.vmap(lambda p: c.mlp(p, x, relu))(members)


def firsts_joined(members, x):
    """The first layers are one product."""
    first, *rest = members
    count = len(first["w"])
    h = relu(x @ jnp.concatenate(list(first["w"]), -1) + first["b"].reshape(-1))
    return jnp.stack([c.mlp(c.member(rest, i), part, relu) for i, part in enumerate(jnp.split(h, count, -1))])


def in_columns(members, x):
    """Features first, rows innermost."""
    found = jnp.stack([c.columns(c.member(members, i), x.T, relu) for i in range(len(members[0]["w"]))])
    return jnp.swapaxes(found, 1, 2)


# -- values of rows ``obs[N, OBS]``


def goes(first, made_of, judged):
    """From ``first``: observations ``[..., OBS]``, actions and ``q[CRITICS, ...]`` of the first timestep."""
    (obs, action, q), gained, left = first, 0.0, 1.0
    promised = [q]
    for _ in range(HORIZON):
        obs, reward, going = moved(made_of(jnp.concatenate([obs, action], -1)), obs)
        gained, left = gained + left * reward, GAMMA * left * going
        action, q = judged(obs)
        promised.append(gained + left * q)
    return promised


def judged_by(target, critics):
    def of(obs):
        action = acts(target["policy"], obs)
        return action, critics(target["critics"], jnp.concatenate([obs, action], -1))[..., 0]

    return of


def once_first(critics, apart=False):
    """The first timestep is the same for all models; then policy and critics see rows of all models at once. ``apart``: models
    one after the other."""

    def value(models, target, obs):
        judged = judged_by(target, critics)
        action, q = judged(obs)
        flat = lambda x: x.reshape(MODELS * len(obs), -1)  # noqa: E731

        def all_judged(obs):
            return jax.tree.map(
                lambda x, axis: x.reshape(*x.shape[:axis], MODELS, -1, *x.shape[axis + 1 :]), judged(flat(obs)), (0, 1)
            )

        def made_of(x):
            if apart:
                return jnp.stack([c.mlp(c.member(models, i), x[i], relu) for i in range(MODELS)])
            return jax.vmap(lambda p, x: c.mlp(p, x, relu))(models, x)

        each = lambda x: jnp.broadcast_to(x, (MODELS, *x.shape))  # noqa: E731
        q = jnp.broadcast_to(q[:, None], (CRITICS, MODELS, len(obs)))
        promised = goes((each(obs), each(action), q), made_of, all_judged)
        return weighed(jnp.stack(promised).reshape(HORIZON + 1, -1, len(obs)))

    return value


def by_steps(models, target, obs):
    """A loop over timesteps of the horizon."""
    judged = judged_by(target, by_vmap)
    action, q = judged(obs)

    def step(carry, _):
        obs, action, gained, left = carry
        made = jax.vmap(lambda p, x: c.mlp(p, x, relu))(models, jnp.concatenate([obs, action], -1))
        obs, reward, going = moved(made, obs)
        gained, left = gained + left * reward, GAMMA * left * going
        action, q = judged(obs)
        return (obs, action, gained, left), gained + left * q

    each = lambda x: jnp.broadcast_to(x, (MODELS, *x.shape))  # noqa: E731
    start = each(obs), each(action), jnp.zeros((MODELS, len(obs))), jnp.ones((MODELS, len(obs)))
    promised = jax.lax.scan(step, start, None, length=HORIZON)[1].reshape(HORIZON, -1, len(obs))
    first = jnp.broadcast_to(q[:, None], (CRITICS, MODELS, len(obs))).reshape(1, -1, len(obs))
    return weighed(jnp.concatenate([first, promised]))


def model_by_model(critics, loop=False):
    """Each model goes all of its way before the next one; ``loop``: in a loop of them."""

    def value(models, target, obs):
        judged = judged_by(target, critics)
        first = obs, *judged(obs)
        one = lambda p: jnp.stack(goes(first, lambda x: c.mlp(p, x, relu), judged))  # noqa: E731
        found = jax.lax.map(one, models) if loop else jnp.stack([one(c.member(models, i)) for i in range(MODELS)])
        return weighed(jnp.moveaxis(found, 0, 1).reshape(HORIZON + 1, -1, len(obs)))

    return value


def value_columns(models, target, obs):
    """Features first, model by model."""

    def judged(x):
        action = jnp.tanh(c.columns(target["policy"], x, relu))
        both = jnp.concatenate([x, action])
        return action, jnp.concatenate([c.columns(c.member(target["critics"], i), both, relu) for i in range(CRITICS)])

    first, found = judged(obs.T), []
    for i in range(MODELS):
        x, (action, q), gained, left = obs.T, first, 0.0, 1.0
        promised = [q]
        for _ in range(HORIZON):
            made = c.columns(c.member(models, i), jnp.concatenate([x, action]), relu)
            x = x + 0.1 * jnp.tanh(made[:OBS])
            gained, left = gained + left * made[OBS], GAMMA * left * jax.nn.sigmoid(made[OBS + 1])
            action, q = judged(x)
            promised.append(gained + left * q)
        found.append(jnp.stack(promised))
    return weighed(jnp.stack(found, 1).reshape(HORIZON + 1, -1, len(obs)))


def all_joined(models, target, obs):
    """Model by model; of what is seen all first layers are one product, and of what is done another."""
    policy, critics = target["policy"], target["critics"]

    def with_model(p):
        nets = [p, *(c.member(critics, i) for i in range(CRITICS))]
        seen = jnp.concatenate([policy[0]["w"], *(net[0]["w"][:OBS] for net in nets)], -1)
        bias = jnp.concatenate([policy[0]["b"], *(net[0]["b"] for net in nets)])
        done = jnp.concatenate([net[0]["w"][OBS:] for net in nets], -1)

        def of(obs):
            """What the model makes, and what the critics say."""
            h = obs @ seen + bias
            cut = policy[0]["w"].shape[-1]
            action = jnp.tanh(c.mlp(policy[1:], relu(h[:, :cut]), relu))
            parts = jnp.split(relu(h[:, cut:] + action @ done), len(nets), -1)
            made, *q = (c.mlp(net[1:], part, relu) for net, part in zip(nets, parts, strict=True))
            return made, jnp.stack(q)[..., 0]

        return of

    found = []
    for i in range(MODELS):
        of, x, gained, left, promised = with_model(c.member(models, i)), obs, 0.0, 1.0, []
        for _ in range(HORIZON + 1):
            made, q = of(x)
            promised.append(gained + left * q)
            x, reward, going = moved(made, x)
            gained, left = gained + left * reward, GAMMA * left * going
        found.append(jnp.stack(promised))
    return weighed(jnp.stack(found, 1).reshape(HORIZON + 1, -1, len(obs)))


def some_at_once(value, count):
    """Values of ``count`` rows after the others."""
    return lambda models, target, obs: jax.lax.map(
        lambda obs: value(models, target, obs), obs.reshape(-1, count, OBS)
    ).reshape(-1)


# -- learning from rows


def critics_written_out(critics, x):
    return jnp.stack([scalar(c.member(critics, i), x) for i in range(CRITICS)])[..., None]


def total(p, x, aim, after, known, models, critics):
    """Summed over rows."""
    goes_on = 1.0 - x["done"].astype(jnp.float32)
    both = jnp.concatenate([x["obs"], x["action"]], -1)
    of_models = model_loss(models(p["models"], both), x, after, goes_on, known)
    of_critics = known * ((critics(p["critics"], both)[..., 0] - aim) ** 2).sum(0)
    frozen = in_columns if critics is in_columns else one_by_one if critics is critics_written_out else critics
    own = jnp.concatenate([x["obs"], acts(p["policy"], x["obs"])], -1)
    judged = frozen(stop_gradient(p["critics"]), own)[..., 0].mean(0)
    return (of_critics + of_models - judged).sum()


def by_hand(length, batch, value, models=by_vmap, critics=by_vmap, again=False):
    def run(p, target, data):
        x = c.rows_of(data)
        found = value(p["models"], target, x["obs"]).reshape(length, batch)
        goes_on = 1.0 - data["done"].astype(jnp.float32)
        aim = data["reward"] + GAMMA * goes_on * c.shifted(found, jnp.zeros(batch))
        after = c.shifted(data["obs"], jnp.zeros((batch, OBS)))
        known = jnp.broadcast_to((jnp.arange(length) + 1 < length)[:, None], (length, batch)).astype(jnp.float32)
        rest = c.rows_of((aim, after, known))
        some = jax.checkpoint(total, static_argnums=(5, 6)) if again else total
        return jax.value_and_grad(lambda p: some(p, x, *rest, models, critics) / (length * batch))(p)

    return run


def backwards(length, batch, chunk, value, models=one_by_one, critics=one_by_one):
    """Blocks of timesteps from the last to the first; the first one's values and observations wait for the block before."""

    def run(p, target, data):
        def body(carry, part):
            whole, later, seen, known = carry
            x = c.rows_of(part)
            found = value(p["models"], target, x["obs"])
            goes_on = 1.0 - x["done"].astype(jnp.float32)
            aim = x["reward"] + GAMMA * goes_on * jnp.concatenate([found[batch:], later])
            after = jnp.concatenate([x["obs"][batch:], seen])
            knows = jnp.concatenate([jnp.ones(len(found) - batch), known])
            loss = lambda p: total(p, x, aim, after, knows, models, critics) / (length * batch)  # noqa: E731
            whole = jax.tree.map(jnp.add, whole, jax.value_and_grad(loss)(p))
            return (whole, found[:batch], x["obs"][:batch], jnp.ones(batch)), None

        none = jnp.zeros(batch)
        start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)), none, jnp.zeros((batch, OBS)), none
        return jax.lax.scan(body, start, c.in_chunks(data, chunk), reverse=True)[0][0]

    return run


def workload(length, batch, hidden, chunk=16):
    rows, back = functools.partial(by_hand, length, batch), functools.partial(backwards, length, batch)
    one, joined, columns, out = (
        (one_by_one,) * 2,
        (firsts_joined,) * 2,
        (in_columns,) * 2,
        (one_by_one, critics_written_out),
    )
    single, loop = model_by_model(one_by_one), model_by_model(one_by_one, loop=True)
    paired, first, second = model_by_model(firsts_joined), once_first(one_by_one), once_first(one_by_one, apart=True)
    count = chunk * batch
    forms = {
        "rlfx": c.learner_by_rlfx(expansion.program, length, batch), "plain": expansion.plain(length, batch),
        "rows": rows(expanded), "steps in a loop": rows(by_steps), "the first once": rows(once_first(by_vmap)),
        "the first once, one by one": rows(first, *one), "model by model": rows(single, *one),
        "models in a loop": rows(loop, *one), "model by model, firsts joined": rows(paired, *joined),
        "all joined": rows(all_joined, *joined), "features first": rows(value_columns, *columns),
        "the first once, models one by one": rows(second, *one), "the first once, written out": rows(first, *out),
        "the first once, models one by one, written out": rows(second, *out),
        f"the first once, models one by one, backwards, blocks of {2 * chunk}": back(2 * chunk, second, *out),
        f"the first once, written out, backwards, blocks of {2 * chunk}": back(2 * chunk, first, *out),
        f"the first once, firsts joined, backwards, blocks of {2 * chunk}": back(2 * chunk, once_first(firsts_joined), *joined),
        f"steps in a loop, backwards, blocks of {2 * chunk}": back(2 * chunk, by_steps, *out),
        "model by model, written out": rows(single, *out), "again": rows(single, *one, again=True),
        f"values in blocks of {chunk}": rows(some_at_once(single, count), *one),
        f"all joined, values in blocks of {chunk}": rows(some_at_once(all_joined, count), *one),
        f"features first, values in blocks of {chunk}": rows(some_at_once(value_columns, count), *one),
        f"the first once, values in blocks of {chunk}": rows(some_at_once(first, count), *one),
        "values with features first, written out": rows(value_columns, *out),
        f"backwards, blocks of {chunk}": back(chunk, single), f"backwards, blocks of {chunk // 2}": back(chunk // 2, single),
        f"written out, backwards, blocks of {chunk}": back(chunk, single, *out),
        f"the first once, backwards, blocks of {chunk}": back(chunk, first),
        f"all joined, backwards, blocks of {chunk}": back(chunk, all_joined, *joined),
        f"all joined, written out, backwards, blocks of {chunk}": back(chunk, all_joined, *out),
        f"features first, backwards, blocks of {chunk}": back(chunk, value_columns, *columns),
        f"models in a loop, backwards, blocks of {chunk}": back(chunk, loop, *out),
        f"steps in a loop, backwards, blocks of {chunk}": back(chunk, by_steps, *out),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 8)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jnp.tanh(jax.random.normal(k[1], (*size, ACTIONS))),
        "reward": jax.random.normal(k[2], size), "done": jax.random.uniform(k[3], size) < 0.02,
        "mask": (jax.random.uniform(k[4], (*size, MODELS)) < 0.8).astype(jnp.float32),
    }  # fmt: skip
    target = {
        "critics": ensemble(k[5], CRITICS, (OBS + ACTIONS, hidden, hidden, 1)),
        "policy": c.mlp_params(k[6], (OBS, hidden, hidden, ACTIONS)),
    }
    return Workload(forms, (params_of(k[7], hidden), target, data), tolerance=2e-5)
