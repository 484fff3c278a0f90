"""Awkward programs compile in at most three times what they take by hand: tracing, lowering and XLA, in CPU time."""

import time

import jax
import numpy as np
import pytest

import rlfx
from tests.recurrence.awkward import AWKWARD, T
from tests.sampling import slow

pytestmark = pytest.mark.optimised

MOST = 3.0
ROUNDS = 3
#: Those of which each is the first of a kind.
FEW = ("a deep chain with parameters", "40 reads of one series at different distances", "solves there and back")


def functions(name):
    """``value and gradient``, of the program and of the same by hand, and their arguments."""
    program, hand, params, carry, options = AWKWARD[name]()
    fn = rlfx.compile(program, length=T, **options)
    key = jax.random.key(0) if name == "draws" else None

    def ours(p, c):
        loss, (_, aux) = fn(p, c, key)
        return loss, aux

    def theirs(p, c):
        result = hand(p, c)
        return result if isinstance(result, tuple) else (result, None)

    return [jax.value_and_grad(f, (0, 1), has_aux=True) for f in (ours, theirs)], (params, carry)


def seconds(f, args):
    """To trace, lower and compile it, with nothing of it known."""
    jax.clear_caches()
    begin = time.process_time()
    compiled = jax.jit(f).lower(*args).compile()
    return time.process_time() - begin, compiled


@pytest.mark.parametrize("name", [n if n in FEW else slow(n) for n in AWKWARD])
def test_compiles_in_three_times_what_it_takes_by_hand(name):
    pair, args = functions(name)
    found = [np.inf, np.inf]
    for attempt in range(ROUNDS):
        results = []
        for i, f in enumerate(pair):
            took, compiled = seconds(f, args)
            found[i] = min(found[i], took)
            results.append(compiled(*args))
        if attempt == 0:
            (ours, _), gradients = results[0]
            (theirs, _), expected = results[1]
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
            for g, e in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(g, e, rtol=1e-3, atol=1e-4 * max(1.0, float(np.abs(e).max())))
        if found[0] <= MOST * found[1]:
            return
    assert found[0] <= MOST * found[1], f"{found[0]:.2f} s, by hand {found[1]:.2f} s"


def test_there_are_thirty_shapes():
    assert len(AWKWARD) >= 30
