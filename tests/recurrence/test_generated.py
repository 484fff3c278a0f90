"""Generated programs against the reference: loss, carry, aux, and gradients with respect to params and carry.

``strategies.program(seed)`` is always the same program. To reproduce a failure:

    python -m tests.recurrence.test_generated SEED

prints it, simplified, with the difference.
"""

import contextlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

import rlfx
from rlfx._target import Target
from rlfx.errors import RlfxError
from tests import strategies
from tests.lanes import OPTIMISED, QUICK
from tests.machines import AS_A_GPU
from tests.sampling import spread

# Programs are small (values are O(1)); what remains is the order of float32 sums.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}

# What the sweep pays for is compilation, so it compiles quickly; every tenth program runs as XLA compiles for users,
# whatever lane the tests are in, and every fiftieth without jit.


def is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def outcome(fn: Any, p: strategies.GeneratedProgram, *, jit: bool = False, options: dict | None = None) -> Any:
    """``{"loss": ..., "carry": ..., "aux": ..., "gradients": ...}``, or the class of the refusal."""
    params, carry, key = p.arguments()
    floats, rest = split(carry)

    def objective(params, floats):
        loss, (next_carry, *aux) = fn(params, merge(floats, rest), key, t0=p.t0)
        total = loss
        if p.cotangents:
            for i, leaf in enumerate(jax.tree.leaves((next_carry, aux))):
                if is_float(leaf):
                    total = total + jnp.sum(jnp.cos(1.0 + i) * leaf)
        return total, {"loss": loss, "carry": next_carry, "aux": aux}

    differentiate = jax.value_and_grad(objective, (0, 1), has_aux=True)
    try:
        (_, out), gradients = (jax.jit(differentiate, compiler_options=options) if jit else differentiate)(
            params, floats
        )
    except (RlfxError, TypeError) as refusal:
        if isinstance(refusal, RlfxError):
            return refusal
        raise
    return {**out, "gradients": gradients}


def split(carry: Any) -> tuple[list, Any]:
    leaves, treedef = jax.tree.flatten(carry)
    return [x for x in leaves if is_float(x)], (leaves, treedef)


def merge(floats: list, rest: Any) -> Any:
    leaves, treedef = rest
    mine = iter(floats)
    return jax.tree.unflatten(treedef, [next(mine) if is_float(x) else x for x in leaves])


def mismatches(got: Any, expected: Any) -> list[str]:
    """What differs, by path; empty if nothing does."""
    refused = [isinstance(x, Exception) for x in (got, expected)]
    if any(refused):
        return [] if type(got) is type(expected) else [f"compiled: {got!r}\nreference: {expected!r}"]
    one, other = (jax.tree_util.tree_flatten_with_path(x) for x in (got, expected))
    if one[1] != other[1]:
        return [f"structure {one[1]} instead of {other[1]}"]
    found = []
    for (path, g), (_, e) in zip(one[0], other[0], strict=True):
        if jnp.issubdtype(g.dtype, jax.dtypes.prng_key):
            g, e = jax.random.key_data(g), jax.random.key_data(e)
        same = g.shape == e.shape and g.dtype == e.dtype
        close = same and (np.allclose(g, e, equal_nan=True, **TOLERANCE) if is_float(g) else np.array_equal(g, e))
        if not close:
            found.append(
                f"{jax.tree_util.keystr(path)}: compiled {g.dtype}{g.shape} {g}\n  reference {e.dtype}{e.shape} {e}"
            )
    return found


def check(
    p: strategies.GeneratedProgram, *, jit: bool = True, options: dict | None = QUICK, target: Target | None = None
) -> tuple[list[str], bool]:
    """``(mismatches, refused)`` of the compiled program. A maximum of nothing has no meaning, so it counts as refused.

    (``rlfx.shared`` may see slices of environments that have ended, which are empty; XLA does not say so, the reference
    does.)
    """
    compiled = rlfx.compile(p.function, **p.options(), target=target)
    with contextlib.suppress(RlfxError):
        compiled.trace(*p.arguments())
    reference = rlfx.reference(p.function, **p.options())
    with contextlib.nullcontext() if jit else jax.disable_jit():
        got = outcome(compiled, p, jit=jit, options=options)
    try:
        expected = outcome(reference, p)
    except ValueError as error:
        if "non-empty reduced dimension" in str(error):
            return [], True
        raise
    return mismatches(got, expected), isinstance(got, Exception)


def fails(p: strategies.GeneratedProgram) -> bool:
    """Whether the compiler is wrong about a program: what the reference cannot run either is no program."""
    try:
        return bool(check(p)[0])
    except Exception:
        try:
            outcome(rlfx.reference(p.function, **p.options()), p)
        except Exception:
            return False
        return True


CHUNK = 25
#: Refusals are legal (a read beyond the end of what cannot be extended), but a sweep of them would test nothing.
MOST_REFUSED = 0.1


def sweep(seeds: range, size: int, target: Target | None = None) -> None:
    refused = 0
    for seed in seeds:
        p = strategies.program(seed, size)
        try:
            found, was_refused = check(p, jit=seed % 50 != 0, options=QUICK if seed % 10 else OPTIMISED, target=target)
        except Exception as error:
            error.add_note(f"{p!r}# python -m tests.recurrence.test_generated {seed} {size}")
            raise
        assert not found, f"{p!r}# python -m tests.recurrence.test_generated {seed} {size}\n" + "\n".join(found)
        refused += was_refused
    assert refused <= max(2, MOST_REFUSED * len(seeds)), f"{refused} of {len(seeds)} programs were refused"


def chunks(first: int, stop: int) -> range:
    return range(first // CHUNK, stop // CHUNK)


@pytest.mark.parametrize("chunk", spread(chunks(0, 100), 2))
def test_a_hundred_programs(chunk: int):
    sweep(range(chunk * CHUNK, (chunk + 1) * CHUNK), size=2)


@pytest.mark.parametrize("chunk", spread(chunks(0, 2000), 2))
def test_programs_as_a_gpu_has_them(chunk: int):
    """With the rewrites of a GPU, which a CPU runs as well."""
    sweep(range(chunk * CHUNK, (chunk + 1) * CHUNK), size=6, target=AS_A_GPU)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", chunks(100, 1000))
def test_a_thousand_programs(chunk: int):
    sweep(range(chunk * CHUNK, (chunk + 1) * CHUNK), size=2)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(20_000 // 100))
def test_twenty_thousand_programs(chunk: int):
    sweep(range(100_000 + chunk * 100, 100_000 + (chunk + 1) * 100), size=6)


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
@given(p=strategies.programs())
def test_programs_that_hypothesis_chooses(p: strategies.GeneratedProgram):
    assert not check(p)[0]


def test_the_same_seed_is_the_same_program():
    assert strategies.program(5) == strategies.program(5)
    assert len({strategies.program(seed).source for seed in range(50)}) > 45


def test_simplifying_keeps_the_failure_and_little_else():
    p = next(p for p in map(strategies.program, range(1000)) if "rlfx.solve" in p.source and len(p.statements) > 8)
    small = strategies.simplify(p, lambda q: "rlfx.solve" in q.source)
    assert "rlfx.solve" in small.source
    assert len(small.statements) < len(p.statements)


def test_mismatches_are_found():
    """The comparison itself: a wrong value, gradient, dtype, shape or refusal does not pass."""
    good = {"x": jnp.ones(3), "n": jnp.int32(2), "k": jax.random.key(0)}
    assert not mismatches(good, good)
    for bad in ({**good, "x": jnp.ones(3) * 1.01}, {**good, "n": jnp.int32(3)}, {**good, "x": jnp.ones((3, 1))}):
        assert mismatches(bad, good)
    assert mismatches({**good, "k": jax.random.key(1)}, good)
    assert mismatches({**good, "n": jnp.float32(2)}, good)
    assert mismatches(ValueError("no"), good)
    assert mismatches({"x": good["x"]}, good)


if __name__ == "__main__":
    chosen = strategies.program(int(sys.argv[1]), *map(int, sys.argv[2:]))
    if fails(chosen):
        chosen = strategies.simplify(chosen, fails)
    print(chosen)
    print(*check(chosen)[0], sep="\n")
