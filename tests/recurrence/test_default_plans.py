"""Default plans on a CPU: wide products kept where memory allows it, data in blocks that fit a core's cache while acting, too."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.cores import LEAST_CACHE, MOST_CACHE, core_cache
from rlfx.recurrence.analysis.divisors import divisor_near
from rlfx.recurrence.gradient.rule import GradientRule
from rlfx.recurrence.plan.choose import (
    AT_A_TIME,
    LOOPED,
    MANY,
    PAGED,
    ROWS_OF_BLOCK,
    cache_block,
    kept_of,
    why_not,
)
from rlfx.recurrence.plan.planner import Options
from rlfx.recurrence.plan.rows import ROWS, ROWS_OF_LAYERS, rows_of_layers
from rlfx.recurrence.schedule.learner import activation_bytes, temporaries

T, B, WIDTH = 16, 4, 131
CPU = rlfx.target("cpu")
KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "pi": jax.random.normal(KEYS[0], (WIDTH, 3)) / 11.0,
    "in": jax.random.normal(KEYS[1], (5, WIDTH)),
    "hidden": jax.random.normal(KEYS[2], (WIDTH, WIDTH)) / 11.0,
}
X = jax.random.normal(KEYS[3], (T, B, 5))


def with_room(**room):
    """The CPU with other caches; behind a core's small one is none that is larger, if nothing is said of it."""
    cache = {"cache": room["tile"]} if "tile" in room else {}
    return replace(CPU, room=replace(CPU.room, **cache | room))


def learner_of(f, params, carry, length=T):
    program = rlfx.trace(f, params, carry, KEYS[0], length=length, batch=B)
    perturbed = frozenset(v for v, x in zip(program.params, jax.tree.leaves(params), strict=True) if x is not X)
    return GradientRule(program, Options(), CPU).learner(perturbed)


def acts(p, x, t):
    """A wide policy that acts: its products are in the loop."""
    logits = jnp.tanh(jnp.tanh(x @ p["in"]) @ p["hidden"]) @ p["pi"]
    action = jax.random.categorical(t.key, jax.lax.stop_gradient(logits))
    moved = jax.lax.stop_gradient(0.9 * jnp.roll(x, 1) + 0.1 * action.astype(x.dtype))
    returns = jax.lax.stop_gradient(rlfx.discounted_sum(rlfx.series(moved[0])[t:], 0.9))
    return -jax.nn.log_softmax(logits)[action] * returns, moved


def recurrent(p, h, t):
    """A wide recurrence that the learner runs again."""
    h = jnp.tanh(h @ p["hidden"] + p["in"][0])
    return jnp.sum(h @ p["pi"]) ** 2, h


def remembers(p, carry, t):
    """A policy that acts by a wide recurrence: its head's products could be kept, and with them those of the recurrence are."""
    x, h = carry
    h = jnp.tanh(h @ p["hidden"] + x @ p["in"])
    logits = h @ p["pi"]
    action = jax.random.categorical(t.key, jax.lax.stop_gradient(logits))
    moved = jax.lax.stop_gradient(0.9 * jnp.roll(x, 1) + 0.1 * action.astype(x.dtype))
    returns = jax.lax.stop_gradient(rlfx.discounted_sum(rlfx.series(moved[0])[t:], 0.9))
    return -jax.nn.log_softmax(logits)[action] * returns, (moved, h)


def off_policy(params, last, t):
    """V-trace on data: acting is no loop, but for the sums over its own results."""
    p, data = params
    x = rlfx.inputs(data)[t]
    out = jnp.tanh(jnp.tanh(x @ p["in"]) @ p["hidden"]) @ p["pi"]
    value = rlfx.series(out[0], end=last)
    target = jax.lax.stop_gradient(rlfx.discounted_sum(value[t:], 0.9) + value[t + 1])
    return (out[0] - target) ** 2 + jnp.sum(out**2), last


def planned(f, carry, target, **options):
    fn = rlfx.compile(options.pop("with_", lambda f: f)(f), length=T, batch=B, target=target, **options)
    return fn.plan(PARAMS, carry, KEYS[0])


def test_wide_products_are_kept_while_the_memory_for_it_is_there():
    x, h = jnp.ones((B, 5)), jnp.zeros((B, WIDTH))
    assert planned(acts, x, CPU).cached
    for unmapped, kept in (
        (2**20, True),
        (2**15, False),
        (2**10, False),
        (None, False),
    ):  # with it they take about 70 KiB
        assert planned(acts, x, with_room(tile=2**12, unmapped=unmapped)).cached == kept
    assert planned(
        acts, x, with_room(unmapped=2**10)
    ).cached  # activations were above it, and are most of what there is
    assert not planned(recurrent, h, CPU).cached
    assert not planned(acts, x, CPU, with_=lambda f: rlfx.incrementalize(f, over="t", block_size=4)).cached


def test_products_of_a_recurrence_count_where_others_are_kept():
    carry, of_gates = (jnp.ones((B, 5)), jnp.zeros((B, WIDTH))), 4 * T * B * WIDTH
    needed = T * kept_of(learner_of(remembers, PARAMS, carry), B)
    assert planned(remembers, carry, with_room(unmapped=needed // 2)).cached
    for tile in (1, 2**12):
        assert not planned(remembers, carry, with_room(tile=tile, unmapped=of_gates)).cached


def test_kept_products_give_way_to_a_budget():
    x = jnp.ones((B, 5))
    target = with_room(tile=2**12, unmapped=0)
    free = rlfx.compile(acts, length=T, batch=B, target=target)
    kept, again = (
        free.explain(PARAMS, x, KEYS[0]).evaluator.measured(replace(free.plan(PARAMS, x, KEYS[0]), cached=c))
        for c in (True, False)
    )
    assert again < kept
    fn = rlfx.compile(acts, length=T, batch=B, target=target, memory_budget=(again + kept) // 2)
    assert not fn.plan(PARAMS, x, KEYS[0]).cached


def test_acting_on_data_runs_in_blocks_that_fit_the_cache():
    small, last = with_room(tile=2**14, cache=2**15, unmapped=0), jnp.ones(B)
    roomy = with_room(tile=2**14, cache=CPU.room.cache, unmapped=0)  # the values of all stay in the machine's cache

    def gradient(make, **options):
        fn = make(off_policy, length=T, batch=B, **options)
        run = jax.value_and_grad(lambda p: fn((p, X), last)[0])
        return (jax.jit(run) if make is rlfx.compile else run)(PARAMS)

    expected = gradient(rlfx.reference)
    for target in (CPU, small):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5),
            gradient(rlfx.compile, target=target),
            expected,
        )
    passes = [
        str(
            rlfx.compile(off_policy, length=T, batch=B, target=target, plan=rlfx.Plan("blocks", 4))
            .physical((PARAMS, X), last, wrt=(True, False))
            .acting
        )
        for target in (CPU, roomy, small)
    ]
    found = [("blocks of 1 timestep, their values of all would be" in text) for text in passes]
    assert found == [False, False, True], passes


def test_one_timestep_that_reads_beyond_the_end_is_not_cut():
    """What is read at T is evaluated from a carry that comes late in the one stage that there is."""

    def program(p, x, t):
        out = jnp.tanh(jnp.tanh(x @ p["in"]) @ p["hidden"]) @ p["pi"]
        action = jax.random.categorical(t.key, jax.lax.stop_gradient(out))
        value = rlfx.series(out[0])
        moved = jnp.roll(x, 1) + action.astype(x.dtype)
        return (out[0] - jax.lax.stop_gradient(0.9 * value[t + 1])) ** 2, jax.lax.stop_gradient(moved)

    def gradient(make, **options):
        fn = make(program, length=1, batch=B, **options)
        return jax.value_and_grad(lambda p: fn(p, X[0], KEYS[1])[0])(PARAMS)

    found, expected = gradient(rlfx.compile, target=with_room(tile=64, cache=64)), gradient(rlfx.reference)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)


def test_copies_of_a_program_have_rows_enough():
    """Blocks of several copies are shorter, but each copy still multiplies enough rows at a time."""
    learner = learner_of(acts, PARAMS, jnp.ones((B, 5)), 1024)
    step = activation_bytes(learner, B)
    target = with_room(tile=8 * step, cache=80 * step)
    blocks = {copies: cache_block(learner, B, target, 1024, copies) for copies in (2, 4, 8, 80)}
    assert blocks == {2: ROWS // B, 4: ROWS // B, 8: 8, 80: 1}


def test_blocks_have_rows_enough_for_their_weights():
    """Each block reads all weights, and adds to their gradients."""
    step = activation_bytes(learner := learner_of(acts, PARAMS, jnp.ones((B, 5)), 1024), B)
    needed = ROWS_OF_BLOCK // B  # every weight multiplies a row for each environment
    for cache, block in ((2**30, needed), (2 * 20 * step, 20), (8 * step, 8)):
        found = cache_block(learner, B, with_room(tile=8 * step, cache=cache, unmapped=0), 1024)
        assert found == divisor_near(1024, block), cache


def test_blocks_have_more_rows_for_weights_that_no_core_s_cache_holds():
    """As far as half of the memory that calls have again, where weights and their gradients go through a slower one."""
    step = activation_bytes(learner := learner_of(acts, PARAMS, jnp.ones((B, 5)), 1024), B)
    weights = 2 * sum(x.nbytes for x in jax.tree.leaves(PARAMS))
    for tile, block in ((weights, weights // step), (weights - 1, 40)):
        room = with_room(tile=tile, cache=8 * step, unmapped=2 * 40 * step)
        assert cache_block(learner, B, room, 1024) == divisor_near(1024, block), tile


def test_blocks_have_rows_enough_for_layers_behind_convolutions():
    """A convolution has a row for each position, and activations that ask for short blocks; a dense layer one for each image."""

    def sees(p, x, t):
        image = rlfx.inputs(p["x"])[t]
        z = jax.lax.conv_general_dilated(image[None], p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.sum(jnp.tanh(jnp.maximum(z, 0).reshape(-1) @ p["dense"]) ** 2), x

    params = {"kernel": jnp.ones((3, 3, 4, 8)), "dense": jnp.ones((8 * 8 * 8, 64)), "x": jnp.ones((64, 2, 8, 8, 4))}
    program = rlfx.trace(sees, params, jnp.zeros(2), KEYS[0], length=64, batch=2)
    learner = GradientRule(program, Options(), CPU).learner(frozenset(v for v in program.params if v.shape[:1] != (64,)))
    step, held = activation_bytes(learner, 2), 2 * params["dense"].nbytes
    assert rows_of_layers(learner, 2, held - 1) == 2
    assert rows_of_layers(learner, 2, held) == math.inf
    for tile, block in ((held - 1, ROWS_OF_LAYERS // 2), (held, divisor_near(64, max(1, held // step)))):
        assert cache_block(learner, 2, with_room(tile=tile, cache=2**20, unmapped=2**25), 64) == block, (tile, step)


def test_blocks_have_rows_enough_for_loops_of_the_users():
    """Imagination reads its weights in every iteration, with a row for each state of a block; what is kept of it goes through."""

    def imagines(p, x, t):
        def go(h, _):
            h = jnp.tanh(h @ p["hidden"])
            return h, h

        return jnp.sum(jax.lax.scan(go, jnp.tanh(rlfx.inputs(p["x"])[t] @ p["in"]), length=12)[1] @ p["pi"]), x

    params = PARAMS | {"x": jnp.ones((1024, B, 5))}
    learner = learner_of(imagines, params, jnp.zeros(B), 1024)
    step = activation_bytes(learner, B)
    for unmapped, block in ((2**30, ROWS // B), (4 * step, 4)):
        target = with_room(tile=2 * step, cache=4 * step, unmapped=unmapped)
        assert cache_block(learner, B, target, 1024) == divisor_near(1024, block), unmapped


def test_blocks_of_a_recurrence_are_one_timestep_or_long_enough_for_their_loops():
    """It reads its weights at every timestep anyway, but blocks of more than one timestep have loops to start."""
    looped = learner_of(remembers, PARAMS, (jnp.ones((B, 5)), jnp.zeros((B, WIDTH))), 1024)
    step = activation_bytes(looped, B)
    for tile, cache, block in ((1, 2**20, 1), (2, 2**20, LOOPED), (2, 8, 4), (16, 2**20, 16)):
        assert cache_block(looped, B, with_room(tile=tile * step, cache=cache * step), 1024) == block


def test_blocks_have_rows_enough_where_a_recurrence_is_the_smaller_part():
    """From every state of a narrow recurrence a wide network goes on: its weights are read by every block."""

    def imagines(p, h, t):
        h = jnp.tanh(h @ p["in"][:, :5])
        ahead = jnp.tanh(jnp.tanh(h @ p["in"]) @ p["hidden"])
        return jnp.sum((ahead @ p["pi"]) ** 2), h

    learner = learner_of(imagines, PARAMS, jnp.ones((B, 5)), 1024)
    assert learner.region.loops
    step, wanted = activation_bytes(learner, B), ROWS_OF_BLOCK / B
    assert cache_block(learner, B, with_room(tile=step, cache=2**30, unmapped=0), 1024) == divisor_near(1024, math.ceil(wanted))
    assert cache_block(learner, B, with_room(tile=step, cache=8 * step, unmapped=0), 1024) == 4


@pytest.mark.parametrize("steps", [1, 3])
def test_weights_of_a_model_that_is_unrolled_are_read_by_each_of_its_steps(steps):
    """However often a timestep multiplies them, it is with as many rows at a time."""

    def unrolls(p, x, t):
        z = jax.lax.stop_gradient(x) @ p["in"]
        for _ in range(steps):
            z = jnp.tanh(z @ p["hidden"])
        return jnp.sum(z**2), x * 0.5

    learner = learner_of(unrolls, PARAMS, jnp.ones((B, 5)), 1024)
    step = activation_bytes(learner, B)
    found = cache_block(learner, B, with_room(tile=step, cache=2**30), 1024)
    assert found == divisor_near(1024, ROWS_OF_BLOCK // B)


@pytest.mark.parametrize("copies", [1, 8])
def test_what_no_timestep_changes_is_differentiated_at_once_where_there_is_room(copies):
    """Where all that is kept is memory that calls have again: of one program, and of its copies by `jax.vmap`."""

    def looks_at(p, x, t):
        seen = jnp.tanh(p["hidden"] @ p["hidden"]) @ p["pi"]
        return jnp.sum(jnp.tanh(x @ p["in"]) @ seen), x * 0.5

    learner = learner_of(looks_at, PARAMS, jnp.ones((B, 5)), 16)
    step = activation_bytes(learner, B) * copies
    for unmapped, block in ((None, 8), (16 * step, 16)):
        room = with_room(tile=step, cache=8 * step, unmapped=unmapped)
        assert cache_block(learner, B, room, 16, copies) == block


def test_a_convolution_multiplies_its_weights_with_a_row_for_each_position():
    def filters(p, x, t):
        out = jax.lax.conv(x[None, None], p, (1, 1), "VALID")
        return jnp.sum(out**2), jax.lax.stop_gradient(x)

    learner = learner_of(filters, jnp.ones((2, 1, 3, 3)), jnp.ones((B, 10, 10)), 1024)
    step = activation_bytes(learner, B)
    assert cache_block(learner, B, with_room(tile=step, cache=2**30), 1024) == 1


def test_what_a_nested_loop_computes_is_among_the_activations_and_its_weights_have_a_row_a_step():
    def ahead(again):
        def step(p, z, _):
            return jnp.tanh(z @ p["hidden"]), jnp.sum(jnp.sin(z))

        step = jax.checkpoint(step) if again else step

        def learns(p, x, t):
            first = jnp.tanh(jax.lax.stop_gradient(x) @ p["in"])
            return jnp.sum(jax.lax.scan(lambda z, _: step(p, z, _), first, None, length=3)[1] ** 2), x * 0.5

        return learner_of(learns, PARAMS, jnp.ones((B, 5)), 1024)

    kept, again = ahead(False), ahead(True)
    state = 4 * B * WIDTH
    assert activation_bytes(again, B) >= 3 * state  # a state for each step
    assert activation_bytes(kept, B) >= activation_bytes(again, B) + 3 * state / 2
    roomy = with_room(tile=1, cache=2**40)
    # Two of three weights multiply a row for each environment: the loop's in each of its steps.
    assert cache_block(kept, B, roomy, 1024) == divisor_near(1024, ROWS_OF_BLOCK // B)


def predicts(params, h, t):
    """A recurrence over data: nothing acts."""
    p, data = params
    h = jnp.tanh(h @ p["hidden"] + rlfx.inputs(data)[t] @ p["in"])
    return jnp.sum(h @ p["pi"]) ** 2, h


def test_what_couples_all_timesteps_keeps_wide_products_too():
    """Pairs of all timesteps: no blocks. Few environments at a time, for the sum over timesteps, only where memory is short."""

    def balances(p, x, t):
        out = jnp.tanh(jnp.tanh(x @ p["in"]) @ p["hidden"]) @ p["pi"]
        action = jax.random.categorical(t.key, jax.lax.stop_gradient(out))
        moved = jax.lax.stop_gradient(jnp.sin(x + action.astype(x.dtype)))
        total = rlfx.series(jax.nn.log_softmax(out)[action])[: t + 1].sum()
        return ((rlfx.series(total)[: t + 1] - total) ** 2).sum(), moved

    batch, x = 4 * B, jnp.linspace(-1.0, 1.0, 20 * B).reshape(4 * B, 5)
    assert why_not("blocks", learner_of(balances, PARAMS, x[:B])) is not None

    def plan(**room):
        fn = rlfx.compile(balances, length=T, batch=batch, target=with_room(tile=2**14, cache=2**20, **room))
        return fn.plan(PARAMS, x, KEYS[0])

    assert plan(unmapped=2**25) == rlfx.Plan(cached=True)
    assert plan(unmapped=2**10).environments is not None
    assert not plan(unmapped=2**10).cached
    kept = rlfx.compile(balances, length=3, batch=2, plan=rlfx.Plan(cached=True))
    found, expected = (
        jax.value_and_grad(lambda p, f=f: f(p, x[:2], KEYS[0])[0])(PARAMS)
        for f in (kept, rlfx.reference(balances, length=3, batch=2))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


def test_the_activations_of_a_recurrence_over_data_are_kept_while_there_is_memory_for_them():
    h = jnp.zeros((B, WIDTH))

    def plan(f, target, params, carry, **options):
        wrt = {"wrt": (True, False)} if isinstance(params, tuple) else {"key": KEYS[0]}
        return rlfx.compile(f, length=T, batch=B, target=target, **options).plan(params, carry, **wrt)

    # Where most of the work is in the loop, what an iteration keeps counts; else what exists at a time.
    learner = learner_of(predicts, (PARAMS, X), h)
    small, needed = activation_bytes(learner, B), T * kept_of(learner, B)
    for unmapped, form in ((needed, "one pass"), (needed - 1, "blocks"), (None, "blocks")):
        assert plan(predicts, with_room(tile=small, unmapped=unmapped), (PARAMS, X), h).form == form
    above = lambda params, h, t: (lambda loss, h: (loss + wide_head(params[0], h), h))(*predicts(params, h, t))  # noqa: E731
    learner = learner_of(above, (PARAMS, X), h)
    needed = math.ceil(AT_A_TIME * temporaries(rlfx.Plan("one pass"), learner, B))
    assert needed > T * kept_of(learner, B)
    for unmapped, once in ((needed, True), (needed - 1, False), (None, False)):  # a tile that holds the weights
        assert (plan(above, with_room(tile=2**18, unmapped=unmapped), (PARAMS, X), h).form == "one pass") == once
    for asks in (partial(rlfx.offload, min_bytes=1), partial(rlfx.fuse_steps, backend="scan")):  # for another way
        assert plan(predicts, with_room(tile=small), (PARAMS, X), h, transform=asks).form == "blocks"
    # What acts is computed once by acting and once by the learner, in blocks or not, where most of it is no recurrence.
    carry = jnp.ones((B, 5)), h
    needed = T * kept_of(learner_of(remembers, PARAMS, carry), B)
    for unmapped, form in ((2 * needed, "one pass"), (needed // 2, "blocks")):
        assert plan(remembers, with_room(tile=small, unmapped=unmapped), PARAMS, carry).form == form
    beside = lambda p, carry, t: (lambda loss, after: (loss + wide_head(p, after[1]), after))(*remembers(p, carry, t))  # noqa: E731
    assert plan(beside, CPU, PARAMS, carry).form != plan(remembers, CPU, PARAMS, carry).form == "one pass"
    # Where operations are slow to start it is a loop less, but for heads that would be differentiated in that loop.
    for name in ("h200", "v5e"):
        assert plan(predicts, rlfx.target(name), (PARAMS, X), h) == rlfx.Plan("one pass")
        assert plan(remembers, rlfx.target(name), PARAMS, carry) == rlfx.Plan()
        drawn = PARAMS | {"back": jnp.eye(5) / 2}
        assert plan(draws, rlfx.target(name), drawn, (carry[0], carry[0])) == rlfx.Plan("one pass")


def controls(params, x, t):
    """A plan made from the end, and followed: what the end gives is chosen in acting's loop, and in no loop of the learner's."""
    p, data = params
    a, b = p["hidden"][:6, :6], p["in"][:2, :6].T
    cost = jax.nn.softplus(rlfx.inputs(data)[t] @ p["in"][:, :8])

    def made(value):
        gain = jnp.linalg.solve(jnp.diag(cost[:2]) + b.T @ value @ b, b.T @ value @ a)
        return gain, jnp.diag(cost[2:]) + a.T @ value @ (a - b @ gain)

    gain, _ = rlfx.solve(lambda plan: made(plan[t + 1][1]), end=(jnp.zeros((2, 6)), jnp.zeros((6, 6))))
    u = gain @ x
    return jnp.sum(u**2), a @ x - b @ u


def test_a_plan_from_the_end_is_made_once():
    """Though acting chooses what the end gives in its loop."""
    x = jnp.ones((B, 6))

    def plan(target):
        return rlfx.compile(controls, length=T, batch=B, target=target).plan((PARAMS, X), x, wrt=(True, False))

    assert plan(CPU) == rlfx.Plan("one pass")
    assert plan(with_room(unmapped=None)) == rlfx.Plan()


def wide_head(p, h):
    """Layers that no loop needs."""
    for _ in range(3):
        h = jnp.tanh(h @ p["hidden"])
    return jnp.sum(h**2)


def draws(p, carry, t):
    """A narrow recurrence that draws what it acts by, and a wide head of weights that no loop reads."""
    h, z = carry
    h = jnp.tanh(h @ p["back"] + z)
    z = jax.random.bernoulli(t.key, jax.nn.sigmoid(jax.lax.stop_gradient(h))).astype(h.dtype)
    return jnp.sum((jnp.tanh(h @ p["in"]) @ p["hidden"] @ p["pi"]) ** 2), (h, z)


def test_weights_that_no_cache_holds_are_read_once():
    params = PARAMS | {"back": jnp.eye(5) / 2}
    carry = jnp.ones((B, 5)), jnp.ones((B, 5))
    learner = learner_of(draws, params, carry)
    weights, kept = sum(PARAMS[name].nbytes for name in ("in", "hidden", "pi")), kept_of(learner, B)
    assert weights > PAGED * kept

    def plan(tile, unmapped):
        target = with_room(tile=tile, cache=16 * 2**20, unmapped=unmapped)
        return rlfx.compile(draws, length=T, batch=B, target=target).plan(params, carry, KEYS[0])

    # Its products are kept by nobody: no timestep is evaluated twice.
    assert plan(tile=weights, unmapped=T * kept) == rlfx.Plan("one pass")
    # What is mapped anew for each call is worth it where many more bytes of weights are spared, and not without end.
    assert plan(tile=weights, unmapped=-(-T * kept // MANY)) == rlfx.Plan("one pass")
    assert plan(tile=weights, unmapped=T * kept // MANY - 1).form != "one pass"
    held = 2 * (weights + params["back"].nbytes)
    assert plan(tile=held - 1, unmapped=2**40) == rlfx.Plan("one pass")
    assert plan(tile=held, unmapped=2**40).form != "one pass"

    def gradient(make, **options):
        fn = make(draws, length=T, batch=B, **options)
        return jax.value_and_grad(lambda p: fn(p, carry, KEYS[0])[0])(params)

    found, expected = gradient(rlfx.compile, target=with_room(tile=weights)), gradient(rlfx.reference)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)


def test_the_cache_of_a_core_is_within_bounds():
    assert LEAST_CACHE <= core_cache() <= MOST_CACHE
    assert CPU.room.tile == core_cache()


def attends(params, carry, t):
    """Attention over a window of other timesteps, on data: blocks of timesteps are not legal."""
    p, data = params
    x = jnp.tanh(rlfx.inputs(data)[t] @ p["in"])
    past = rlfx.series(x).window(-2, 2)
    return jnp.sum((jax.nn.softmax(past @ x) @ past @ p["pi"]) ** 2), carry


def test_acting_evaluates_nothing_for_the_learner_that_the_learner_evaluates_anyway():
    learners = rlfx.compile(attends, length=T, batch=B, target=CPU).physical(
        (PARAMS, X), jnp.zeros(B), wrt=(True, False)
    )
    acting = [e.op.name for node in learners.acting.nodes for e in node.equations]
    assert "dot_general" not in acting, acting  # the maximum of the softmax is smaller than the scores, and needs them
    assert "dot_general" in [e.op.name for node in learners.learning.nodes for e in node.equations]


def test_learners_that_read_windows_take_environments_that_fit_the_cache():
    zero = jnp.zeros(B)

    def plan(target):
        return rlfx.compile(attends, length=T, batch=B, target=target).plan((PARAMS, X), zero, wrt=(True, False))

    assert plan(CPU) == rlfx.Plan()
    learner_bytes = 2**18  # of 4 environments, about
    small = with_room(unmapped=2**12, cache=learner_bytes)
    chosen = plan(small)
    assert chosen == rlfx.Plan(environments=2)
    assert "environment" in str(chosen)

    def gradient(fn):
        return jax.value_and_grad(lambda p: fn((p, X), zero)[0])(PARAMS)

    want = gradient(rlfx.reference(attends, length=T, batch=B))
    for options in ({"target": small}, {"plan": rlfx.Plan(environments=2)}, {"plan": rlfx.Plan(environments=1)}):
        got = gradient(rlfx.compile(attends, length=T, batch=B, **options))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4 * np.abs(b).max()), got, want)


def looks_back(params, carry, t):
    """Attention over all of the past."""
    q, k, v = (rlfx.inputs(params["x"])[t] @ params[name] for name in ("q", "k", "v"))
    keys, values = rlfx.series(k)[: t + 1], rlfx.series(v)[: t + 1]
    return jnp.square(jax.nn.softmax(keys @ q) @ values).sum(), carry


def test_learners_of_slices_as_wide_as_all_timesteps_take_few_environments():
    """Two at least; all of them where the memory for it is there, or where the machine has no cache of its own for it."""
    length, batch, d = 16, 6, 4
    keys = jax.random.split(jax.random.key(0), 4)
    params = {name: jax.random.normal(k, (d, d)) / 2.0 for name, k in zip(("q", "k", "v"), keys, strict=False)}
    params["x"] = jax.random.normal(keys[3], (length, batch, d))
    carry = jnp.zeros(batch)

    def compiled(**room):
        return rlfx.compile(looks_back, length=length, batch=batch, target=with_room(tile=1 << 10, **room))

    few = compiled(cache=1 << 10, unmapped=1 << 10)
    assert few.plan(params, carry) == rlfx.Plan(environments=2)
    assert compiled(cache=1 << 16, unmapped=1 << 10).plan(params, carry) == rlfx.Plan(environments=3)
    for room in ({"unmapped": 1 << 30}, {"unmapped": None}):
        assert compiled(cache=1 << 10, **room).plan(params, carry) == rlfx.Plan()
    reference = rlfx.reference(looks_back, length=length, batch=batch)
    found, expected = (jax.jit(jax.value_and_grad(lambda p, fn=fn: fn(p, carry)[0]))(params) for fn in (few, reference))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, expected)


def windowed(n):
    """A policy that acts, and learns from what follows within n timesteps."""

    def loss(p, x, t):
        logits = jnp.tanh(x @ p["in"][:, :8]) @ p["pi"][:8]
        action = jax.random.categorical(t.key, jax.lax.stop_gradient(logits))
        moved = jax.lax.stop_gradient(0.9 * jnp.roll(x, 1) + 0.1 * action.astype(x.dtype))
        return -jax.nn.log_softmax(logits)[action] * jnp.sum(rlfx.series(moved[0])[t : t + n]), moved

    return loss


def test_streams_that_hold_much_of_the_rollout_are_for_what_would_not_fit():
    def form(n, unmapped):
        fn = rlfx.compile(windowed(n), length=100, batch=B, target=with_room(tile=2**6, unmapped=unmapped))
        return fn.plan(PARAMS, jnp.ones((B, 5)), KEYS[0]).form

    assert [form(n, CPU.room.unmapped) for n in (2, 5, 12, 24)] == ["stream", "stream", "blocks", "blocks"]
    assert [form(n, 2**6) for n in (2, 5, 12, 24)] == ["stream"] * 4


def test_chunks_of_a_stream_make_up_for_the_buffers_that_every_chunk_copies():
    def chunk(n, tile):
        fn = rlfx.compile(windowed(n), length=100, batch=B, target=with_room(tile=tile, unmapped=0))
        found = fn.plan(PARAMS, jnp.ones((B, 5)), KEYS[0])
        assert found.form == "stream"
        return found.block

    short, middle, long = (chunk(n, 2**6) for n in (2, 12, 24))
    assert short == 1 < middle < long
    assert chunk(2, 2**12) > short  # what the cache holds, where that is more


def believes(params, h, t):
    """A belief that is learned from at the next timestep, too: no blocks; it decodes all timesteps of the data."""
    p, data = params
    given = rlfx.inputs(data)
    h = jnp.tanh(h @ p["h"] + given[t] @ p["in"][:, :16])
    belief = rlfx.series(h[:8], start=jnp.zeros(8))
    told = jnp.tanh((h @ p["wide"])[None] + given[:] @ p["in"][:, :64]).mean(0)
    return jnp.sum((belief[t] - belief[t - 1]) ** 2) + jnp.mean(told**2), h


def test_recurrences_without_blocks_take_environments_at_a_time():
    k, many = jax.random.split(jax.random.key(1), 3), 16
    p = {"h": jax.random.normal(k[0], (16, 16)) / 4, "in": PARAMS["in"], "wide": jax.random.normal(k[1], (16, 64)) / 4}
    data, h = jax.random.normal(k[2], (T, many, 5)), jnp.zeros((many, 16))

    def loss_fn(**options):
        return rlfx.compile(believes, length=T, batch=many, **options)

    learner = loss_fn(target=CPU).explain((p, data), h).learner
    assert why_not("blocks", learner) is not None
    assert learner.region.loops
    each = activation_bytes(learner, 1, slices=False) * T

    def chosen(count, **rates):
        target = with_room(tile=2**14, cache=int(count * each), unmapped=int(4 * each))  # less than one pass keeps
        return loss_fn(target=replace(target, rates=replace(target.rates, **rates))).plan((p, data), h)

    assert chosen(4, overhead=1e-9) == rlfx.Plan(environments=4)
    assert chosen(9, overhead=1e-9) == rlfx.Plan(environments=8)
    assert chosen(2, overhead=1e-9) == rlfx.Plan()  # of two rows a product does little else than read weights
    assert chosen(4, overhead=1.0) == rlfx.Plan()  # loops would take longer to start than activations to memory
    assert chosen(16, overhead=1e-9) == rlfx.Plan()

    def gradient(fn):
        return jax.value_and_grad(lambda p: fn((p, data), h)[0])(p)

    expected = gradient(rlfx.reference(believes, length=T, batch=many))
    for plan in (rlfx.Plan(), rlfx.Plan(environments=4)):
        found = gradient(loss_fn(plan=plan))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)


def test_a_budget_takes_fewer_environments_where_there_are_no_blocks():
    many = 16
    p = {"h": jnp.eye(16) / 4, "in": PARAMS["in"], "wide": jnp.ones((16, 64)) / 8}
    data, h = jnp.ones((64, many, 5)), jnp.zeros((many, 16))
    whole = rlfx.compile(believes, length=64, batch=many, plan=rlfx.Plan())
    needed = whole.explain((p, data), h, measure=True).measured_bytes
    small = rlfx.compile(believes, length=64, batch=many, memory_budget=needed // 3)
    plan = small.plan((p, data), h)
    assert plan.form == "at once"
    assert plan.environments in (1, 2, 4, 8)
    assert small.explain((p, data), h).measured_bytes <= needed // 3


def through_dynamics(p, x, t):
    """The gradient flows through what acts: all of it is differentiated, but for noise and returns."""
    action = jnp.tanh(x @ p["in"]) @ p["hidden"][:, :5] + 0.1 * jax.random.normal(t.key, (5,))
    value = rlfx.series(jax.lax.stop_gradient(jnp.sum(x)), end=0.0)
    target = jax.lax.stop_gradient(rlfx.discounted_sum(value[t:], 0.9))
    return jnp.sum(x**2) + 0.1 * (jnp.sum(x) - target) ** 2, 0.9 * x + 0.1 * jnp.sin(action)


def test_where_all_that_acts_is_learned_from_it_runs_forward_once():
    x = jnp.ones((B, 5))
    assert planned(through_dynamics, x, with_room(tile=1)) == rlfx.Plan("one pass")
    assert planned(through_dynamics, x, with_room(tile=1, unmapped=1)).form == "blocks"

    def gradient(make, **options):
        fn = make(through_dynamics, length=T, batch=B, **options)
        return jax.value_and_grad(lambda p: fn(p, x, KEYS[0])[0])(PARAMS)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5),
        gradient(rlfx.compile, target=with_room(tile=1)),
        gradient(rlfx.reference),
    )


def through_returns(p, x, t):
    """As in `through_dynamics`, and through returns, which read the next timestep: there are no blocks."""
    action = jnp.tanh(x @ p["in"]) @ p["hidden"][:, :5] + 0.1 * jax.random.normal(t.key, (5,))
    value = rlfx.series(jnp.sum(x**2), end=0.0)
    return -rlfx.discounted_sum(value[t:], 0.9), 0.9 * x + 0.1 * jnp.sin(action)


def test_where_there_are_no_blocks_a_recurrence_runs_forward_once_too():
    """All at once it would run for the last carry, and again for the gradient."""
    x, kept = jnp.ones((B, 5)), with_room(tile=1)
    assert planned(through_returns, x, kept) == rlfx.Plan("one pass")
    assert planned(through_returns, x, with_room(tile=1, unmapped=1)).form == "at once"  # not where it keeps too much
    asked = rlfx.compile(through_returns, length=T, batch=B, target=kept, transform=rlfx.vectorize)
    assert asked.plan(PARAMS, x, KEYS[0]).form == "one pass"

    def gradient(make, **options):
        fn = make(through_returns, length=T, batch=B, **options)
        return jax.value_and_grad(lambda p: fn(p, x, KEYS[0]), has_aux=True)(PARAMS)

    found, expected = gradient(rlfx.compile, target=kept), gradient(rlfx.reference)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), found, expected)


def test_what_no_timestep_changes_is_differentiated_in_few_blocks():
    """An encoder of what all timesteps look at: each block runs it forwards and backwards, so that a large one has few blocks."""
    length = 64
    seen, x = jax.random.normal(KEYS[0], (40, 8)), jnp.ones((length, B, 5))

    def blocks(rows):
        def looks(p, carry, t):
            code = jnp.tanh(jnp.tanh(seen[:rows] @ p["in"]) @ p["hidden"]).mean(0)
            return ((jnp.tanh(rlfx.inputs(x)[t] @ p["own"]) @ p["pi"]) * code[:3]).sum() ** 2, carry

        p = {
            "in": jnp.ones((8, WIDTH)),
            "hidden": PARAMS["hidden"],
            "own": PARAMS["in"],
            "pi": PARAMS["pi"],
        }
        learner = learner_of(looks, p, jnp.zeros(B), length)
        step = activation_bytes(learner, B)
        small = with_room(tile=4 * step, cache=72 * step, unmapped=0)
        return length // cache_block(learner, B, small, length)

    assert blocks(40) == 1
    assert blocks(1) > 1
