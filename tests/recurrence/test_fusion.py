"""Products with inputs that a loop over t computes itself: the same values and gradients, and less is kept.

The oracle is Python loops over timesteps and environments, differentiated by jax alone.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import Plan
from rlfx.recurrence.execute.loops import is_made_again
from rlfx.recurrence.schedule.fusion import CLOSE
from rlfx.recurrence.schedule.physical import Repeated
from tests.sampling import spread

CPU = rlfx.target("cpu")
D, H = 3, 4


def with_room(close, **rewrites):
    """A CPU with so many bytes in one half of its cache, and which takes no time to start an operation."""
    room, rates = dataclasses.replace(CPU.room, tile=2 * close), dataclasses.replace(CPU.rates, overhead=1e-9)
    return dataclasses.replace(CPU, room=room, rates=rates, rewrites=dataclasses.replace(CPU.rewrites, **rewrites))


SMALL, WITHOUT = with_room(1), with_room(1, inside=False)


def layer_params(key, rows, gates):
    k = jax.random.split(key, 3)
    size = gates * H
    return {
        "x": jax.random.normal(k[0], (rows, size)) / 2,
        "h": jax.random.normal(k[1], (H, size)) / 2,
        "b": jnp.ones(size) / 5,
    }


def lstm(p, state, x):
    cell, h = state
    i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    return (cell, jax.nn.sigmoid(o) * jnp.tanh(cell)), h


def gru(p, state, x):
    (h,) = state
    (xr, xz, xn), (hr, hz, hn) = jnp.split(x @ p["x"] + p["b"], 3), jnp.split(h @ p["h"], 3)
    z = jax.nn.sigmoid(xz + hz)
    h = z * h + (1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn)
    return (h,), h


CELLS = {"lstm": (lstm, 4, 2), "gru": (gru, 3, 1)}


@dataclasses.dataclass(frozen=True)
class Case:
    """Layers of a cell on an embedding of data; episodes that end at each environment's own timestep."""

    cell: str = "lstm"
    layers: int = 1
    length: int = 5
    batch: int = 2

    @property
    def params(self):
        keys = jax.random.split(jax.random.key(3), self.layers + 2)
        gates = CELLS[self.cell][1]
        return {
            "in": jax.random.normal(keys[0], (D, H)),
            "layers": [layer_params(k, H, gates) for k in keys[2:]],
            "out": jax.random.normal(keys[1], (H, 2)),
        }

    @property
    def carry(self):
        count = self.layers * CELLS[self.cell][2]
        states = 0.3 * jax.random.normal(jax.random.key(4), (count, self.batch, H))
        each = CELLS[self.cell][2]
        return [tuple(states[n * each : (n + 1) * each]) for n in range(self.layers)], jnp.zeros(self.batch)

    @property
    def ends(self):
        """The timestep at which each environment ends under ``until=``."""
        return 1 + np.arange(self.batch) % self.length

    @property
    def data(self):
        return jax.random.normal(jax.random.key(5), (self.length, self.batch, D))

    def point(self, p, states, x):
        """The loss, the new states and what is put out."""
        y, new = jnp.tanh(x @ p["in"]), []
        for layer, state in zip(p["layers"], states, strict=True):
            state, _ = CELLS[self.cell][0](layer, state, y)
            y, new = state[-1], [*new, state]
        return jnp.sum((y @ p["out"] - x[0]) ** 2), new, y @ p["out"]

    def program(self, params, carry, t):
        p, data = params
        states, passed = carry
        loss, states, out = self.point(p, states, rlfx.inputs(data)[t])
        return loss, (states, passed + 1.0), out


LATER = jnp.linspace(0.5, -0.3, H)


def outcome(fn, case, data):
    def total(p, carry):
        loss, (after, out) = fn((p, data), carry)
        return loss + jnp.sum(after[0][0][0] @ LATER), out

    return jax.jit(jax.value_and_grad(total, has_aux=True))(case.params, case.carry)


@functools.cache
def expected(case, until=False):
    """Loops over environments and their timesteps."""

    def total(p, carry):
        loss, last, outs, count = 0.0, 0.0, [], 0
        for b in range(case.batch):
            states = jax.tree.map(lambda x: x[b], carry[0])
            for t in range(int(case.ends[b]) if until else case.length):
                one, states, out = case.point(p, states, case.data[t, b])
                loss, outs, count = loss + one, [*outs, out], count + 1
            last += states[0][0] @ LATER
        return loss / count + last, jnp.stack(outs)

    return jax.jit(jax.value_and_grad(total, has_aux=True))(case.params, case.carry)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def compare(found, case):
    (total, out), grads = found
    (wanted, outs), slopes = expected(case)
    close(total, wanted)
    close(jnp.moveaxis(out, 0, 1).reshape(outs.shape), outs)
    jax.tree.map(close, grads, slopes)


def compiled(case, target=SMALL, **options):
    return rlfx.compile(case.program, length=case.length, batch=case.batch, target=target, **options)


def spared(case, fn, pass_="acting"):
    """Bytes that the loops of a pass are not given."""
    passes = fn.physical((case.params, case.data), case.carry, wrt=(True, False))
    return sum(n.loop.spared for n in getattr(passes, pass_).nodes if isinstance(n, Repeated))


PLANS = {
    "default": None,
    "at once": Plan(),
    "kept": Plan(cached=True),
    "blocks of 1": Plan("blocks", 1),
    "blocks of 2, kept": Plan("blocks", 2, cached=True),
    "tiles": Plan("blocks", 3, 1),
    "one pass": Plan("one pass"),
}
SOME = "default", "at once"
CASES = {
    Case(): PLANS,
    Case("gru", 2): ("at once", "blocks of 2, kept", "one pass"),
    Case("gru"): SOME,
    Case(layers=2): SOME,
    Case(length=1): SOME,
    Case("gru", batch=1): SOME,
}


@pytest.mark.parametrize("case", spread(CASES, 3), ids=str)
def test_values_and_gradients_are_those_of_loops(case):
    compare(outcome(rlfx.reference(case.program, length=case.length, batch=case.batch), case, case.data), case)
    for name in CASES[case]:
        fn = compiled(case, plan=PLANS[name])
        assert spared(case, fn) > 0 or case.length == 1, name  # a single timestep is no loop
        compare(outcome(fn, case, case.data), case)


def test_states_that_are_computed_again():
    """``remat(every=2)``: checkpoints of the recurrence, its products inside."""
    case = Case()
    fn = rlfx.compile(rlfx.remat(case.program, every=2), length=case.length, batch=case.batch, target=SMALL)
    assert spared(case, fn) > 0
    compare(outcome(fn, case, case.data), case)


@pytest.mark.parametrize("case", spread([Case("gru", 2, batch=4), Case(batch=4)], 1), ids=str)
def test_on_two_devices(case):
    mesh = jax.make_mesh((2,), ("b",), devices=jax.devices()[:2])
    for plan in (None, Plan(), Plan("blocks", 2)):
        fn = compiled(case, mesh=mesh, plan=plan)
        assert spared(case, fn) > 0
        compare(outcome(fn, case, case.data), case)


@pytest.mark.parametrize("case", spread([Case("gru", 2, batch=3), Case(batch=4)], 1), ids=str)
def test_environments_that_end_at_different_timesteps(case):
    """What an environment would be given after its end is NaN."""
    (wanted, outs), slopes = expected(case, until=True)
    alive = np.arange(case.length)[:, None] < case.ends
    data = jnp.where(alive[..., None], case.data, jnp.nan)
    ends = lambda carry: carry[1] >= carry[2]  # noqa: E731

    def program(params, carry, t):
        loss, (states, passed), out = case.program(params, carry[:2], t)
        return loss, (states, passed, carry[2]), out

    def total(p, carry, plan):
        options = {} if plan == "reference" else {"target": SMALL, "plan": plan}
        make = rlfx.reference if plan == "reference" else rlfx.compile
        fn = make(program, length=case.length, batch=case.batch, until=ends, **options)
        loss, (after, out, lengths) = fn((p, data), carry)
        return loss + jnp.sum(after[0][0][0] @ LATER), (out, lengths)

    carry = (*case.carry, jnp.asarray(case.ends, jnp.float32))
    for plan in ("reference", None, Plan(), Plan(cached=True), Plan("blocks", 2)):
        run = jax.value_and_grad(functools.partial(total, plan=plan), has_aux=True)
        (found, (out, lengths)), grads = (run if plan == "reference" else jax.jit(run))(case.params, carry)
        close(found, wanted)
        close(lengths, case.ends)
        close(jnp.concatenate([out[: case.ends[b], b] for b in range(case.batch)]), outs)
        jax.tree.map(close, grads, slopes)


def test_a_learner_computes_in_its_loop_what_its_blocks_are_too_long_for():
    """With 40 bytes a point, blocks of 2 timesteps of 2 environments stay in a cache of 512 bytes; all 5 do not."""
    case = Case()
    gates = 4 * 4 * H * case.batch
    fn = lambda plan: compiled(case, with_room(3 * gates), plan=plan)  # noqa: E731
    assert spared(case, fn(Plan())) == 5 * gates
    assert [spared(case, fn(p), "learning") for p in (Plan(), Plan("blocks", 2), Plan("blocks", 4))] == [
        5 * gates,
        0,
        5 * gates,
    ]


def test_what_stays_in_the_cache_is_given():
    case = Case()
    size = 4 * 4 * H * case.batch * case.length
    assert [spared(case, compiled(case, with_room(room))) for room in (size - 1, size)] == [size, 0]
    assert spared(case, compiled(case, WITHOUT)) == 0
    assert spared(case, compiled(case, rlfx.target("h100"))) == 0


def test_only_what_is_smaller_before_stays_before():
    """Of a wide embedding the loop is given the narrow end."""

    def program(params, h, t):
        p, data = params
        y = jnp.tanh(jnp.tanh(rlfx.inputs(data)[t] @ p["wide"]) @ p["narrow"])
        h = jnp.tanh(y @ p["x"] + h @ p["h"])
        return jnp.sum(h**2), h

    size, batch = 256, 512
    shapes = {"wide": (size, 512), "narrow": (512, 2), "x": (2, 16), "h": (16, 16)}
    p = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    data = jax.ShapeDtypeStruct((8, batch, size), jnp.float32)
    fn = rlfx.compile(program, length=8, batch=batch, target=with_room(4096))
    passes = fn.physical((p, data), jax.ShapeDtypeStruct((batch, 16), jnp.float32), wrt=(True, False))
    (loop,) = (n.loop for n in passes.acting.nodes if isinstance(n, Repeated))
    rows = sorted(e.inputs[1].shape[0] for e in loop.body if e.op.name == "dot_general")
    assert rows == [2, 16]


def test_what_is_used_before_the_loop_or_at_another_timestep_is_given():
    def earlier(params, h, t):
        p, data = params
        x = rlfx.series(rlfx.inputs(data)[t] @ p["x"], start=0.0)
        h = jnp.tanh(x[t - 1] + h @ p["h"])
        return jnp.sum(h**2), h

    def normalised(params, h, t):
        p, data = params
        x = rlfx.inputs(data)[t] @ p["x"]
        h = jnp.tanh(x - rlfx.mean(x, ("t", "b")) + h @ p["h"])
        return jnp.sum(h**2), h

    p = {"x": jnp.ones((D, H)), "h": jnp.ones((H, H))}
    for f in (earlier, normalised):
        fn = rlfx.compile(f, length=5, batch=2, target=SMALL)
        passes = fn.physical((p, Case().data), jnp.ones((2, H)), wrt=(True, False))
        assert not any(n.loop.spared for n in passes.acting.nodes if isinstance(n, Repeated))


def test_random_numbers_of_a_product_in_a_loop_are_drawn_there_alone():
    def program(params, h, t):
        p, data = params
        x = rlfx.inputs(data)[t] + jax.random.normal(t.key_for("noise"), (D,))
        h = jnp.tanh(x @ p["x"] + h @ p["h"])
        return jnp.sum(h**2), h

    p = {"x": jnp.ones((D, H)), "h": jnp.ones((H, H))}
    fn = rlfx.compile(program, length=5, batch=2, target=SMALL)
    passes = fn.physical((p, Case().data), jnp.ones((2, H)), jax.random.key(0), wrt=(True, False))
    before = [e.op.name for n in passes.acting.nodes if not isinstance(n, Repeated) for e in n.equations]
    assert "random_bits" not in before


def test_explain_says_so():
    case = Case(length=4096, batch=8)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), ((case.params, case.data), case.carry))
    text = str(compiled(case, with_room(1 << 20)).physical(*shapes, wrt=(True, False)))
    assert "computes products itself that would be 2 MiB if they were given to it" in text


def outer(p, state, t):
    """Linear attention with a gate: a state is a sum of outer products, each made of two vectors."""
    x = rlfx.inputs(p["x"])[t]
    key, value = x[:WIDE_STATE] * p["k"], x[WIDE_STATE:]
    state = jax.nn.sigmoid(p["g"])[:, None] * state + jnp.outer(jnp.exp(-key), value)
    return jnp.sum((jnp.tanh(value) @ state @ p["w"]) ** 2), state


def of_outer(length=6, batch=3):
    k = jax.random.split(jax.random.key(3), 6)
    p = {"w": 0.5 * jax.random.normal(k[0], (WIDE_STATE, 2)), "k": jax.random.normal(k[1], (WIDE_STATE,))}
    p |= {"g": jax.random.normal(k[3], (WIDE_STATE,)), "x": jax.random.normal(k[4], (length, batch, 2 * WIDE_STATE))}
    return p, 0.1 * jax.random.normal(k[5], (batch, WIDE_STATE, WIDE_STATE))


WIDE_STATE = 8


def test_what_is_made_of_little_is_made_in_the_loop_and_again_for_its_derivative():
    args = of_outer()
    for target, inside in ((with_room(1 << 10), True), (with_room(1 << 30), False), (with_room(1 << 10, inside=False), False)):
        fn = rlfx.compile(outer, length=6, batch=3, target=target, plan=Plan())
        (loop,) = fn.explain(*args, wrt=True).learner.at_once.loops
        assert ("exp" in [e.op.name for e in loop.body]) == (loop.spared > 0) == is_made_again(loop) == inside
        assert not any(e.op.name == "dot_general" for e in loop.body)  # they read what is kept of all timesteps
        text = str(jax.make_jaxpr(jax.grad(lambda p, h, fn=fn: fn(p, h)[0]))(*args))
        assert ("remat" in text or "checkpoint" in text) == inside


def test_what_is_made_of_little_is_made_in_the_loop_where_it_would_stay_in_the_cache():
    """It is fused with what reads it; products are given, which start by themselves."""

    def attending(p, state, t):
        loss, state = outer(p, state, t)
        return loss + jnp.tanh(rlfx.inputs(p["x"])[t] @ p["in"] + state[0, :2]).sum(), state

    batch = 96
    p, h = of_outer(batch=batch)
    p["in"] = jnp.ones((2 * WIDE_STATE, 2))
    fn = rlfx.compile(attending, length=6, batch=batch, target=with_room(1 << 30))
    learner = fn.explain(p, h, wrt=True).learner
    for schedule in (learner.at_once, learner.region):
        (loop,) = schedule.loops
        assert loop.spared == 4 * 6 * batch * WIDE_STATE**2 > CLOSE
        assert not any(e.op.name == "dot_general" for e in loop.body)
    reference = rlfx.reference(attending, length=6, batch=batch)
    one, other = (jax.value_and_grad(lambda p, f=f: f(p, h)[0])(p) for f in (fn, reference))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), one, other)


@pytest.mark.parametrize("plan", [None, rlfx.Plan(), rlfx.Plan("one pass"), rlfx.Plan("blocks", 2)], ids=str)
def test_values_and_derivatives_of_what_is_made_again(plan):
    p, h = of_outer()
    fns = rlfx.compile(outer, length=6, batch=3, target=with_room(1 << 10), plan=plan), rlfx.reference(outer, length=6, batch=3)
    w = {n: p[n] for n in "wkg"}
    loss = lambda fn: lambda w: fn({**p, **w}, h)[:2]  # noqa: E731
    one, other = (jax.value_and_grad(loss(fn), has_aux=True)(w) for fn in fns)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), one, other)
    if plan is None:
        product = lambda fn: jax.jvp(jax.grad(lambda w: loss(fn)(w)[0]), (w,), (w,))  # noqa: E731
        several = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), w)
        mapped = lambda fn: jax.vmap(jax.grad(lambda w: loss(fn)(w)[0]))(several)  # noqa: E731
        for made in (product, mapped):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), *map(made, fns))


def test_effects_are_not_made_again():
    seen = []

    def noted(p, state, t):
        loss, state = outer(p, state, t)
        rlfx.effect(seen.append, state[0, 0])
        return loss, state

    p, h = of_outer()
    fn = rlfx.compile(noted, length=6, batch=3, target=with_room(1 << 10))
    jax.jit(jax.grad(lambda p: fn(p, h)[0]))(p)
    jax.effects_barrier()
    assert len(seen) == 6
