"""What one index chooses, computed of what it chooses: the same numbers and derivatives, and fewer products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.analysis.cost import PRODUCTS, flops_of
from rlfx.recurrence.rewrite.chosen import with_chosen_first

LENGTH, BATCH, ACTIONS, WIDTH = 4, 3, 4, 6
K = jax.random.split(jax.random.key(0), 6)
PARAMS = {
    "own": jax.random.normal(K[0], (ACTIONS, WIDTH, WIDTH)) / 2.0, "bias": jax.random.normal(K[1], (ACTIONS, WIDTH)),
    "w": jax.random.normal(K[2], (WIDTH, WIDTH)) / 2.0, "last": jax.random.normal(K[3], (WIDTH,)),
}  # fmt: skip
START = jax.random.normal(K[4], (BATCH, WIDTH))
ACTION = jax.random.randint(K[5], (LENGTH, BATCH), 0, ACTIONS)
relu, softmax = jax.nn.relu, jax.nn.softmax


def moved(p, z):
    """What follows from a state after every action: each has weights of its own."""
    return z[None] + jnp.tanh(jnp.einsum("i,aij->aj", z, p["own"]) + p["bias"])


def judged(p, z):
    """Of any number of states ``[..., WIDTH]``."""
    return jnp.tensordot(relu(z @ p["w"] + 0.1), p["last"], 1)


def values(p, h):
    return judged(p, moved(p, h))


def tree(p, h):
    """Of two actions, one after the other."""
    after = moved(p, h)
    below = judged(p, jax.vmap(lambda z: moved(p, z))(after))
    return jnp.sum(p["bias"], 1) + 0.9 * (softmax(below) * below).sum(-1)


def normalised(p, h):
    """Sums along other axes, things that are spread, and positions that count on."""
    z = moved(p, h)
    z = z / jnp.sqrt((z**2).sum(-1, keepdims=True) + 1.0)
    return judged(p, z) + jnp.arange(float(ACTIONS)) + jnp.asarray([0.1, 0.2, 0.3, 0.4]) + p["last"][0]


def not_a_number(p, h):
    """What is not chosen may be infinite."""
    q = values(p, h)
    return jnp.where(q > 0.5, q, jnp.inf * jnp.sign(q - 0.5))


def columns(p, h):
    """Actions are the last axis."""
    return p["last"] @ jnp.tanh(p["w"] @ moved(p, h).T)


CHOSEN = [values, tree, normalised, columns]


def learner(of, choose=lambda q, a: q[a]):
    def loss(params, h, t):
        p, action = params
        return jnp.cos(choose(of(p, h), rlfx.inputs(action)[t])), 0.9 * h

    return loss


def program_of(loss):
    return rlfx.trace(loss, (PARAMS, ACTION), START, length=LENGTH, batch=BATCH)


def work(program):
    return sum(flops_of(e, program.domain) for e in program.equations if e.op in PRODUCTS)


def gradient(make, loss):
    f = make(loss, length=LENGTH, batch=BATCH)
    return jax.jit(jax.value_and_grad(lambda p, h: f((p, ACTION), h)[0], (0, 1)))(PARAMS, START)


def by_loop(of, choose=lambda q, a: q[a]):
    """With nothing of ours: the mean over points, and its derivative."""

    def total(p, h, action):
        found = []
        for t in range(LENGTH):
            found += [jnp.cos(choose(of(p, h[b]), action[t, b])) for b in range(BATCH)]
            h = 0.9 * h
        return jnp.stack(found).mean()

    return jax.jit(jax.value_and_grad(total, (0, 1)))(PARAMS, START, ACTION)


def close(found, expected):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5), found, expected)


@pytest.mark.parametrize("of", CHOSEN, ids=lambda f: f.__name__)
def test_values_and_gradients_are_those_of_a_loop(of):
    close(gradient(rlfx.compile, learner(of)), by_loop(of))


@pytest.mark.parametrize("of", [tree], ids=lambda f: f.__name__)
def test_values_and_gradients_are_those_of_the_reference(of):
    close(gradient(rlfx.compile, learner(of)), gradient(rlfx.reference, learner(of)))


@pytest.mark.parametrize("of", CHOSEN, ids=lambda f: f.__name__)
def test_what_is_not_chosen_is_not_multiplied(of):
    """Idempotent; and the law of every rewrite: the same by the reference."""
    program = program_of(learner(of))
    found = with_chosen_first(program)
    assert work(found) < 0.75 * work(program)
    assert with_chosen_first(found) is found
    close(
        *(jax.jit(lambda p, h, x=x: rlfx.reference(x)((p, ACTION), h)[0])(PARAMS, START) for x in (program, found)),
    )


def test_how_much_is_left_out():
    """Of a product with weights of the axis one result is taken; what is made of it has one row in place of four."""
    program = program_of(learner(values))
    own, rest = 2 * ACTIONS * WIDTH * WIDTH, 2 * WIDTH * WIDTH + 2 * WIDTH
    assert work(program) == own + ACTIONS * rest
    assert work(with_chosen_first(program)) == own + rest


@pytest.mark.parametrize("part", [0, -1, slice(1, 3)], ids=str)
def test_a_number_takes_weights(part):
    """Of several critics, each with weights of its own, an actor asks one; others stay untouched."""

    def critics(p, h):
        one = lambda own, bias: jnp.tanh(relu(h @ own + bias) @ own) @ p["last"]  # noqa: E731
        return jax.vmap(one)(p["own"], p["bias"])

    choose = lambda q, a: q[part].sum()  # noqa: E731
    program = program_of(learner(critics, choose))
    found = with_chosen_first(program)
    assert work(found) == work(program) // ACTIONS * (2 if part == slice(1, 3) else 1)
    assert with_chosen_first(found) is found
    close(gradient(rlfx.compile, learner(critics, choose)), by_loop(critics, choose))
    first = lambda q, a: q[0] + jnp.max(q)  # noqa: E731
    program = program_of(learner(critics, first))
    assert with_chosen_first(program) is program


@pytest.mark.parametrize("index", [-1, -ACTIONS, ACTIONS + 3, -ACTIONS - 2])
def test_places_from_the_end_and_outside(index):
    """As jax reads them."""
    choose = lambda q, a: q[jnp.where(a == 1, index, a)]  # noqa: E731
    close(gradient(rlfx.compile, learner(tree, choose)), by_loop(tree, choose))


def test_what_is_not_chosen_may_be_anything():
    p = {**PARAMS, "last": jnp.full(WIDTH, jnp.inf).at[0].set(1.0)}

    def of(p, h):
        return jnp.tensordot(jnp.eye(ACTIONS, WIDTH) + 0.0 * moved(p, h), p["last"], 1)  # 0 * inf of all but the first

    loss, action = learner(of), jnp.zeros_like(ACTION)
    found = rlfx.compile(loss, length=LENGTH, batch=BATCH)((p, action), START)[0]
    expected = rlfx.reference(loss, length=LENGTH, batch=BATCH)((p, action), START)[0]
    np.testing.assert_array_equal(found, expected)


def greedy(p, h):
    """All values are needed to choose."""
    q = values(p, h)
    return q - q.max()


def heads(p, h):
    """There is nothing but weights of the axis."""
    return jnp.tanh(jnp.einsum("i,aij->aj", h, p["own"])).sum(-1)


@pytest.mark.parametrize("of", [greedy, heads], ids=lambda f: f.__name__)
def test_others_stay(of):
    program = program_of(learner(of))
    assert with_chosen_first(program) is program
    close(gradient(rlfx.compile, learner(of)), by_loop(of))


def test_what_is_needed_whole_beside_stays():
    """States after all actions are multiplied with that after one: all are made."""

    def compared(p, h):
        z = jnp.tanh(moved(p, h) @ p["w"])
        return (z @ z.T).sum(-1)

    program = program_of(learner(compared))
    assert work(program) - work(with_chosen_first(program)) == 2 * (ACTIONS - 1) * ACTIONS * WIDTH
    close(gradient(rlfx.compile, learner(compared)), by_loop(compared))


def test_two_choices_stay():
    choose = lambda q, a: q[a] * q[(a + 1) % ACTIONS]  # noqa: E731
    program = program_of(learner(values, choose))
    assert with_chosen_first(program) is program
    close(gradient(rlfx.compile, learner(values, choose)), by_loop(values, choose))


def test_values_that_are_returned_stay():
    def loss(params, h, t):
        p, action = params
        q = values(p, h)
        return jnp.cos(q[rlfx.inputs(action)[t]]), 0.9 * h, q

    program = program_of(loss)
    assert with_chosen_first(program) is program


def test_a_row_of_a_matrix():
    """The other axes are whole."""

    def loss(params, h, t):
        p, action = params
        return jnp.cos((moved(p, h) @ p["w"])[rlfx.inputs(action)[t]]).sum(), 0.9 * h

    program = program_of(loss)
    assert work(with_chosen_first(program)) < work(program)
    f, reference = (make(loss, length=LENGTH, batch=BATCH) for make in (rlfx.compile, rlfx.reference))
    of = lambda f: jax.value_and_grad(lambda p: f((p, ACTION), START)[0])(PARAMS)  # noqa: E731
    close(of(f), of(reference))


def test_in_an_acting_loop_and_with_blocks():
    """What was done follows from what was seen, so that it is in the loop."""

    def loss(p, h, t):
        action = jax.random.randint(t.key, (), 0, ACTIONS)
        after = moved(p, h)
        return values(p, h)[action], jax.lax.stop_gradient(jnp.tanh(after[action] @ p["w"]))

    how = {"length": LENGTH, "batch": BATCH}
    of = lambda f: jax.jit(jax.value_and_grad(lambda p: f(p, START, jax.random.key(5))[0]))(PARAMS)  # noqa: E731
    expected = of(rlfx.reference(loss, **how))
    close(of(rlfx.compile(loss, **how)), expected)
    close(of(rlfx.compile(loss, **how, plan=rlfx.Plan("blocks", block=2))), expected)


NUMBERS = {
    "the first": lambda q, _: q[0], "the last": lambda q, _: q[-1], "two of them": lambda q, _: q[1:3].prod(),
    "of a stack": lambda q, _: jnp.stack([q, 2.0 * q, q])[1][2],
}  # fmt: skip


@pytest.mark.parametrize("choose", NUMBERS.values(), ids=NUMBERS)
def test_what_a_number_chooses(choose):
    program = program_of(learner(normalised, choose))
    found = with_chosen_first(program)
    assert work(found) < work(program)
    assert with_chosen_first(found) is found
    close(gradient(rlfx.compile, learner(normalised, choose)), by_loop(normalised, choose))


@pytest.mark.parametrize("choose", [lambda q, _: q[1:].sum(), lambda q, _: q[0] * q[1], lambda q, _: q[::2].sum()])
def test_most_of_an_axis_and_several_parts_and_every_other_one_stay(choose):
    program = program_of(learner(values, choose))
    assert with_chosen_first(program) is program
    close(gradient(rlfx.compile, learner(values, choose)), by_loop(values, choose))


def tokens(params, h, t):
    """Three tokens a timestep, which attend to all tokens before them; what becomes of the second one counts."""
    p, data = params
    x = jnp.stack([h, jnp.tanh(rlfx.inputs(data)[t] * h), h * p["last"]])
    query, key, value = x @ p["w"], jnp.tanh(x), x @ p["own"][0]
    keys, values = rlfx.series((key, value))[: t + 1]
    share = jax.nn.softmax(jnp.einsum("qd,skd->qsk", query, keys), axis=(-2, -1))
    made = x + jnp.tanh(jnp.einsum("qsk,skd->qd", share, values) @ p["own"][1])
    return jnp.cos(made[1]).sum(), 0.9 * h


def tokens_by_loop(p, h, data):
    """With nothing of ours."""
    total = 0.0
    for b in range(BATCH):
        state, seen = h[b], []
        for t in range(LENGTH):
            x = jnp.stack([state, jnp.tanh(data[t, b] * state), state * p["last"]])
            seen.append(x)
            past = jnp.concatenate(seen)
            share = jax.nn.softmax((x[1] @ p["w"]) @ jnp.tanh(past).T)
            total += jnp.cos(x[1] + jnp.tanh(share @ (past @ p["own"][0]) @ p["own"][1])).sum()
            state = 0.9 * state
    return total / (LENGTH * BATCH)


@pytest.mark.parametrize("plan", [None, rlfx.Plan(), rlfx.Plan(environments=1)], ids=str)
def test_of_several_tokens_a_timestep_one_asks(plan):
    """Through products with slices whose length depends on the timestep: one query in place of three."""
    data = jax.random.normal(K[5], (LENGTH, BATCH))
    program = rlfx.trace(tokens, (PARAMS, data), START, length=LENGTH, batch=BATCH)
    assert work(with_chosen_first(program)) < 0.75 * work(program)
    f = rlfx.compile(tokens, length=LENGTH, batch=BATCH, plan=plan)
    wrt = 0 if plan is not None and plan.environments else (0, 1)
    found = jax.jit(jax.value_and_grad(lambda p, h: f((p, data), h)[0], wrt))(PARAMS, START)
    close(found, jax.jit(jax.value_and_grad(tokens_by_loop, wrt))(PARAMS, START, data))
