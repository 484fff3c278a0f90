"""A state that begins anew does so where it is read: the same numbers, and one array less written in an iteration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J

T, B, N = 8, 2, 16
KEY = jax.random.key(3)
CARRY = {"w": 0.2 * jax.random.normal(KEY, (B, N, N)), "z": jnp.full((B, N, N), 0.1), "n": jnp.zeros(B, jnp.int32)}


def learns(_, carry, t):
    """Along traces that are cut where an episode ends."""
    x = jnp.cos(jnp.arange(N, dtype=jnp.float32) * 0.3 + t.now.astype(jnp.float32) * (1.0 + carry["n"].astype(jnp.float32)))
    z = 0.9 * carry["z"] + jnp.outer(x, jnp.tanh(x @ carry["w"]))
    w = carry["w"] - 0.01 * z / (1.0 + jnp.abs(z).sum())
    done = (t.now + carry["n"]) % 5 == 4
    return {"w": w, "z": ends(done, z), "n": carry["n"] + done.astype(jnp.int32)}, (w[0, 0], done)


def ends(done, z):
    return jnp.where(done, 0.0, z)


def by_hand(carry):
    """With a Python loop in NumPy, one environment after the other."""
    found, outs = [], []
    for b in range(B):
        w, z, n, out = np.asarray(carry["w"][b]), np.asarray(carry["z"][b]), int(carry["n"][b]), []
        for t in range(T):
            x = np.cos(np.arange(N, dtype=np.float32) * 0.3 + t * (1.0 + n)).astype(np.float32)
            z = 0.9 * z + np.outer(x, np.tanh(x @ w))
            w = w - 0.01 * z / (1.0 + np.abs(z).sum())
            done = (t + n) % 5 == 4
            out.append((w[0, 0], done))
            z, n = (np.zeros_like(z) if done else z), n + int(done)
        found.append({"w": w, "z": z, "n": n})
        outs.append(out)
    carry = {k: np.stack([f[k] for f in found]) for k in carry}
    return carry, tuple(np.stack([[o[i] for o in out] for out in outs], 1) for i in range(2))


def notes(f, carry=CARRY, **how):
    return str(rlfx.unroll(f, length=T, batch=B, **how).explain(None, carry, verbose=True))


def carried(f, carry=CARRY, **how):
    """The shapes that the loop carries."""
    jaxpr = jax.make_jaxpr(rlfx.unroll(f, length=T, batch=B, **how))(None, carry)
    (scan,) = [e for e in J.equations_in({"jaxpr": jaxpr}) if e.primitive is J.SCAN and e.params["length"] == T]
    first, count = J.scan_counts(scan.params)
    return [v.aval.shape for v in scan.invars[first : first + count]]


def close(found, expected, rtol=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), found, expected)


def test_it_is_what_a_plain_loop_gives():
    """The last state, too, which begins anew only behind the loop."""
    found, expected = rlfx.unroll(learns, length=T, batch=B)(None, CARRY), by_hand(CARRY)
    close(found, expected)
    assert {bool(x) for x in np.all(expected[0]["z"] == 0.0, (1, 2))} == {False}  # no episode ends with the last timestep
    later = {**CARRY, "n": jnp.asarray([0, 1], jnp.int32)}
    found, expected = rlfx.unroll(learns, length=T, batch=B)(None, later), by_hand(later)
    assert {bool(x) for x in np.all(expected[0]["z"] == 0.0, (1, 2))} == {False, True}
    close(found, expected)


def test_it_is_what_the_reference_gives():
    """Values, and derivatives through the loop by what it began with."""
    fn, reference = rlfx.unroll(learns, length=T, batch=B), rlfx.reference(learns, length=T, batch=B, loss=False)
    close(fn(None, CARRY), reference(None, CARRY))

    def gradient(fn):
        def total(w, z):
            carry, (seen, _) = fn(None, {**CARRY, "w": w, "z": z})
            return jnp.sin(carry["z"]).sum() + (carry["w"] ** 2).sum() + seen.sum()

        return jax.grad(total, (0, 1))(CARRY["w"], CARRY["z"])

    close(gradient(fn), gradient(reference), 2e-4)


def test_of_a_loss():
    def learner(scale, carry, t):
        after, (seen, _) = learns(None, carry, t)
        after["w"] = after["w"] * scale
        return (seen - 0.3) ** 2, after

    fn, reference = (make(learner, length=T, batch=B) for make in (rlfx.compile, rlfx.reference))
    of = lambda fn: jax.value_and_grad(lambda s: fn(s, CARRY)[0])(jnp.float32(0.97))  # noqa: E731
    close(of(fn), of(reference), 2e-4)


def test_the_loop_carries_what_is_computed_and_whether_it_begins_anew():
    assert "1 state begins anew where it is read" in notes(learns)
    assert sorted(carried(learns)) == sorted([(B, N, N), (B, N, N), (B,), (B,)])


@pytest.mark.parametrize(
    "choice",
    [
        lambda done, z: jnp.where(~done, z, 0.0),
        lambda done, z: jax.lax.select_n(done, z, jnp.full_like(z, 0.25)),
    ],
    ids=["the other way", "another number"],
)
def test_choices_of_a_number(choice, monkeypatch):
    monkeypatch.setitem(globals(), "ends", choice)
    jax.clear_caches()
    with jax.numpy_dtype_promotion("standard"):
        f = lambda *args: learns(*args)  # noqa: E731
        assert "1 state begins anew where it is read" in notes(f)
        fn, reference = rlfx.unroll(f, length=T, batch=B), rlfx.reference(f, length=T, batch=B, loss=False)
        close(fn(None, CARRY), reference(None, CARRY))


def test_a_condition_that_is_the_same_for_all_environments():
    def every_fourth(_, carry, t):
        after, out = learns(None, carry, t)
        z = 0.9 * carry["z"] + after["w"]
        return {**after, "z": jnp.where(t.now % 4 == 3, 0.0, z)}, (out[0], z.sum())

    assert "1 state begins anew" in notes(every_fourth)
    fn, reference = rlfx.unroll(every_fourth, length=T, batch=B), rlfx.reference(every_fourth, length=T, batch=B, loss=False)
    close(fn(None, CARRY), reference(None, CARRY))


def multiplied(_, carry, t):
    after, out = learns(None, carry, t)
    return {**after, "w": after["w"] + 1e-3 * carry["z"] @ carry["z"]}, out


def returned(_, carry, t):
    after, out = learns(None, carry, t)
    return after, (*out, after["z"])


def used(_, carry, t):
    after, out = learns(None, carry, t)
    return {**after, "w": after["w"] - 1e-3 * after["z"]}, out


def between_arrays(_, carry, t):
    after, out = learns(None, carry, t)
    z = carry["z"] * 0.9 + 0.1 * after["w"]
    return {**after, "z": jnp.where(out[1], jnp.eye(N), z)}, (out[0], z.sum())


def by_elements(_, carry, t):
    after, out = learns(None, carry, t)
    z = carry["z"] * 0.9 + 0.1 * after["w"]
    return {**after, "z": jnp.where(z > 0.2, 0.0, z)}, (out[0], z.sum())


def alone(_, carry, t):
    """Nothing else needs what it would be otherwise."""
    z = 0.9 * carry["z"] + jnp.sin(t.now.astype(jnp.float32))
    return {**carry, "z": jnp.where(t.now % 5 == 4, 0.0, z)}, (carry["z"].sum(),)


def given_on(_, carry, t):
    """A state that is nothing but what it is set to, and one that stays what it was."""
    after, out = learns(None, carry, t)
    ages = jax.lax.broadcasted_iota(jnp.float32, (N, N), 0)
    return {**after, "w": ages, "z": carry["z"]}, (out[0], jnp.tanh(carry["w"]).sum())


@pytest.mark.parametrize("f", [multiplied, returned, used, between_arrays, by_elements, alone, given_on])
def test_others_stay_as_they_are(f):
    assert "begins anew" not in notes(f)
    fn, reference = rlfx.unroll(f, length=T, batch=B), rlfx.reference(f, length=T, batch=B, loss=False)
    close(fn(None, CARRY), reference(None, CARRY))


def test_a_small_state_stays():
    few = 4
    assert few * few < rlfx.target("cpu").rewrites.postponed
    carry = {"w": CARRY["w"][:, :few, :few], "z": CARRY["z"][:, :few, :few], "n": CARRY["n"]}

    def small(_, carry, t):
        z = 0.9 * carry["z"] + carry["w"]
        done = (t.now + carry["n"]) % 5 == 4
        return {"w": carry["w"] - 0.01 * z, "z": ends(done, z), "n": carry["n"]}, z.sum()

    assert "begins anew" not in notes(small, carry)


def test_episodes_that_end():
    """Under ``until=`` states are held, and kept as they are."""
    how = {"until": lambda carry: carry["n"] >= 2}
    fn = rlfx.unroll(learns, length=T, batch=B, **how)
    reference = rlfx.reference(learns, length=T, batch=B, loss=False, **how)
    close(fn(None, CARRY), reference(None, CARRY))


def test_under_vmap():
    fn = rlfx.unroll(learns, length=T, batch=B)
    carries = jax.tree.map(lambda x: jnp.stack([x, x + 1 if x.dtype == jnp.int32 else 0.5 * x]), CARRY)
    found = jax.vmap(lambda c: fn(None, c))(carries)
    for i in range(2):
        one = jax.tree.map(lambda x: x[i], carries)
        close(jax.tree.map(lambda x: x[i], found), fn(None, one))


def test_a_part_of_a_longer_time():
    """From ``t0`` on, with the state that the part before it left."""
    first, second = (rlfx.unroll(learns, length=n, batch=B) for n in (5, T - 5))
    carry, early = first(None, CARRY)
    carry, late = second(None, carry, t0=5)
    whole, out = rlfx.unroll(learns, length=T, batch=B)(None, CARRY)
    close((carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), early, late)), (whole, out))


def test_on_a_mesh():
    mesh = jax.make_mesh((2,), ("b",), devices=jax.devices()[:2])
    close(rlfx.unroll(learns, length=T, batch=B, mesh=mesh)(None, CARRY), by_hand(CARRY))


def random_program(seed):
    """A step of several states, ``(carry, time) -> (carry, out)``, with its carry: what begins anew, how, and what reads it, is
    drawn."""
    rng = np.random.default_rng(seed)
    shapes = [(16, 16), (256,), (2, 4, 32), (3,)]
    plans = [(shape, rng.integers(5), rng.integers(3), rng.integers(4), float(rng.normal())) for shape in shapes]
    carry = {str(i): jnp.asarray(rng.normal(size=(B, *shape)), jnp.float32) for i, shape in enumerate(shapes)}

    def step(carry, time):
        after, out = {}, jnp.float32(0.0)
        for i, (shape, way, reading, period, number) in enumerate(plans):
            x = carry[str(i)]
            read = [x, jnp.sin(x), (x.reshape(-1, shape[-1]) @ jnp.eye(shape[-1])).reshape(shape)][reading]
            places = jnp.arange(shape[-1], dtype=jnp.float32).reshape(*(1 for _ in shape[1:]), -1)
            y = 0.8 * read + 0.1 * jnp.cos(time.astype(jnp.float32) + places)
            done = ((time + i) % (period + 2) == 1) | (y.reshape(-1)[0] > 0.9)
            out += jnp.tanh(y).sum()
            after[str(i)] = [
                lambda: jnp.where(done, number, y), lambda: jnp.where(done, y, number), lambda: jnp.where(done, jnp.nan, y),
                lambda: y, lambda: jax.lax.cond(done, lambda: jnp.zeros_like(y), lambda: y),
            ][way]()  # fmt: skip
        return after, out

    return step, carry


@pytest.mark.parametrize("seed", range(4))
def test_random_programs(seed):
    """Against ``lax.scan``, which knows nothing of it: values, and derivatives by what they began with."""
    step, carry = random_program(seed)

    def scanned(carry):
        return jax.lax.scan(lambda c, t: jax.vmap(step, (0, None))(c, t), carry, jnp.arange(T))

    ours = rlfx.unroll(lambda _, carry, t: step(carry, t.now), length=T, batch=B)

    def total(fn):
        def of(carry):
            carry, out = fn(carry)
            return sum(jnp.nan_to_num(jnp.cos(x)).sum() for x in jax.tree.leaves(carry)) + jnp.nan_to_num(out).sum()

        return jax.jit(jax.grad(of))

    found, expected = jax.jit(lambda c: ours(None, c))(carry), jax.jit(scanned)(carry)
    close(found, expected)
    close(total(lambda c: ours(None, c))(carry), total(scanned)(carry), 2e-4)


def test_random_programs_have_what_is_postponed():
    programs = map(random_program, range(4))
    counts = [notes(lambda _, c, t, step=step: step(c, t.now), carry).count("anew") for step, carry in programs]
    assert sum(counts) >= 2, counts
