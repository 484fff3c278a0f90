"""The access table: every way to index another timestep, right in value and in gradient.

Each row is compared to the reference interpreter, and to a loop in float64 NumPy differentiated by central differences,
for ``y[t] = c[t] * sum(x[phi(t)] ** 2)`` and inside nonlinear networks: plain, with a batch, under ``vmap``, and inside
recurrences that run forwards and backwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from tests.sampling import met

T = 7
FEATURES, HIDDEN = 2, 3


@dataclass(frozen=True)
class Row:
    """One access: how a program writes it, and which positions it means at t."""

    text: str
    read: Callable[[Any, Any], Any]
    positions: Callable[[int], list[int]]

    def rows(self, x: Any, t: Any) -> Any:
        """What is read, with a leading axis."""
        found = self.read(x, t)
        return found if ":" in self.text or self.text == "block" else found[None]

    def at(self, x: np.ndarray, t: int, b: int) -> np.ndarray:
        """The same of x: [T, B, ...] at t, b in NumPy."""
        if self.text == "x[i, b]":
            return x[[CHOSEN[t]], [ENVIRONMENT[t, b]]]
        return x[np.asarray(self.positions(t), int), b]


def _inside(lo: int, hi: int) -> list[int]:
    return list(range(max(lo, 0), min(hi, T)))


BLOCK = 3
#: traced indices into the past, and environments
CHOSEN = np.array([0, 1, 0, 2, 4, 1, 6])
ENVIRONMENT = np.array([[0, 1], [1, 1], [1, 0], [0, 0], [0, 1], [1, 1], [0, 0]])
ROWS = [
    Row("t", lambda x, t: x[t], lambda t: [t]),
    Row("T-1-t", lambda x, t: x[t.length - 1 - t], lambda t: [T - 1 - t]),
    Row("min(t+1,T-1)", lambda x, t: x[rlfx.minimum(t + 1, t.length - 1)], lambda t: [min(t + 1, T - 1)]),
    Row("max(t-1,0)", lambda x, t: x[rlfx.maximum(t - 1, 0)], lambda t: [max(t - 1, 0)]),
    Row("t//2", lambda x, t: x[t // 2], lambda t: [t // 2]),
    Row("t%4", lambda x, t: x[t % 4], lambda t: [t % 4]),
    Row("0:T", lambda x, t: x[:], lambda t: list(range(T))),
    Row("0:t+1", lambda x, t: x[: t + 1], lambda t: list(range(t + 1))),
    Row("t:T", lambda x, t: x[t:], lambda t: list(range(t, T))),
    Row("t:min(t+3,T)", lambda x, t: x[t : rlfx.minimum(t + 3, t.length)], lambda t: _inside(t, t + 3)),
    Row("max(0,t-2):t+1", lambda x, t: x[rlfx.maximum(0, t - 2) : t + 1], lambda t: _inside(t - 2, t + 1)),
    Row(
        "max(0,t-2):min(t+3,T)",
        lambda x, t: x[rlfx.maximum(0, t - 2) : rlfx.minimum(t + 3, t.length)],
        lambda t: _inside(t - 2, t + 3),
    ),
    Row(
        "block",
        lambda x, t: x[t - t % BLOCK : t - t % BLOCK + BLOCK],
        lambda t: _inside(t - t % BLOCK, t - t % BLOCK + BLOCK),
    ),
    Row("2t:2t+2", lambda x, t: x[2 * t : 2 * t + 2], lambda t: _inside(2 * t, 2 * t + 2)),
    Row("t//2:t+1", lambda x, t: x[t // 2 : t + 1], lambda t: _inside(t // 2, t + 1)),
    Row("x[i]", lambda x, t: x[rlfx.inputs(jnp.asarray(CHOSEN), axes="t")[t]], lambda t: [int(CHOSEN[t])]),
]
ACROSS = Row(
    "x[i, b]",
    lambda x, t: x[rlfx.inputs(jnp.asarray(CHOSEN), axes="t")[t], rlfx.inputs(jnp.asarray(ENVIRONMENT))[t]],
    list,
)
row_cases = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.text)


# -- what is computed from what is read: written once, for jnp and for NumPy ------------------------------------------


@dataclass(frozen=True)
class Network:
    """``encode(xp, p, obs)`` is x at t; ``loss(xp, p, obs, rows)`` uses what was read of it."""

    name: str
    encode: Callable
    loss: Callable


def _attention(xp: Any, p: Any, obs: Any, rows: Any) -> Any:
    scores = rows @ (p["query"] @ obs)
    weights = xp.exp(scores - scores.max())
    weights = weights / weights.sum()
    return xp.sum(xp.tanh(weights @ rows))


squares = Network("squares", lambda xp, p, obs: obs[0], lambda xp, p, obs, rows: obs[1] * xp.sum(rows**2))
mlp = Network(
    "mlp",
    lambda xp, p, obs: xp.tanh(p["encode"] @ obs),
    lambda xp, p, obs, rows: xp.sum(xp.tanh(rows @ p["mix"].T) * xp.tanh(p["query"] @ obs)[None]),
)
attention = Network("attention", mlp.encode, _attention)
NETWORKS = [squares, mlp, attention]


def parameters(batch: int | None, seed: int = 0) -> dict[str, np.ndarray]:
    """Float64 parameters; the data are among them, so that their gradients are tested too."""
    rng = np.random.default_rng(seed)
    lead = (T,) if batch is None else (T, batch)
    return {
        "obs": rng.uniform(-1, 1, (*lead, FEATURES)),
        "encode": rng.uniform(-1, 1, (HIDDEN, FEATURES)),
        "query": rng.uniform(-1, 1, (HIDDEN, FEATURES)),
        "mix": rng.uniform(-1, 1, (HIDDEN, HIDDEN)),
        "decay": np.asarray(0.7),
    }


def program(row: Row, networks: Sequence[Network], nested: str) -> Callable:
    """The per-timestep program: what every network makes of its own parameters, each in aux, and their sum."""

    def value_of(network: Network, p: Any, t: Any) -> Any:
        obs = rlfx.inputs(p["obs"])
        x = rlfx.series(network.encode(jnp, p, obs[t]))

        def value(previous):
            return jnp.tanh(p["decay"] * previous + network.loss(jnp, p, obs[t], row.rows(x, t)))

        if nested == "plain":
            return network.loss(jnp, p, obs[t], row.rows(x, t))
        if nested == "forward":
            return rlfx.solve(lambda s: value(s[t - 1]), start=0.3)
        return rlfx.solve(lambda s: value(s[t + 1]), end=0.3)

    def f(params, carry, t):
        values = {network.name: value_of(network, params[network.name], t) for network in networks}
        return sum(values.values()), carry, values

    return f


def value_and_gradient(fn: Callable) -> Callable:
    """Parameters of networks to the mean value of each of them, and to its gradient by its own parameters."""

    def total(params):
        loss, (_, values) = fn(params, None)
        return loss, jax.tree.map(jnp.mean, values)

    def run(params):
        grads, values = jax.grad(total, has_aux=True)(params)
        return values, grads

    return run


def by_loop(row: Row, network: Network, nested: str, p: dict[str, np.ndarray]) -> float:
    """The same in a NumPy loop."""

    obs = p["obs"] if p["obs"].ndim == 3 else p["obs"][:, None]
    batch = obs.shape[1]
    x = np.stack([[np.asarray(network.encode(np, p, o)) for o in row_of_obs] for row_of_obs in obs])
    total = 0.0
    for b in range(batch):
        s = 0.3
        for t in range(T) if nested != "backward" else reversed(range(T)):
            y = network.loss(np, p, obs[t, b], row.at(x, t, b))
            s = np.tanh(p["decay"] * s + y)
            total += y if nested == "plain" else s
    return float(total / (T * batch))


def differences(f: Callable[[dict], float], p: dict[str, np.ndarray], step: float = 1e-6) -> dict[str, np.ndarray]:
    """Central differences of f with respect to every entry."""

    def partial(name: str, i: int) -> float:
        def shifted(by):
            moved = p[name].copy()
            moved.reshape(-1)[i] += by
            return f({**p, name: moved})

        return (shifted(step) - shifted(-step)) / (2 * step)

    return {k: np.array([partial(k, i) for i in range(v.size)]).reshape(v.shape) for k, v in p.items()}


def single(p: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {k: jnp.asarray(v, jnp.float32) for k, v in p.items()}


def assert_close(got: Any, expected: Any, tolerance: float = 2e-5) -> None:
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=tolerance, atol=tolerance), got, expected)


def legal(row: Row) -> list[Network]:
    """The networks that may read the row: softmax has no meaning on an empty slice (test_errors has the refusal)."""
    empty = row is not ACROSS and not all(row.positions(t) for t in range(T))
    return [n for n in NETWORKS if not (empty and n is attention)]


def errors(row: Row, nested: str, p: dict, values: dict, grads: dict) -> dict[str, tuple[float, float]]:
    """By network, the largest errors in value and gradient against the loop; asserts that they are small."""
    found = {}
    for network in legal(row):
        loop = lambda q: by_loop(row, network, nested, q)  # noqa: E731
        loss, grad, exact = values[network.name], grads[network.name], differences(loop, p)
        assert_close((loss, grad), (loop(p), exact))
        found[network.name] = (
            abs(float(loss) - loop(p)),
            max(float(np.abs(np.asarray(grad[k]) - exact[k]).max()) for k in p),
        )
    return found


def compare(row: Row, nested: str, batch: int | None, seed: int = 0, reference: bool = True) -> dict:
    """Every network that may read the row, in one program, to the loop and to the reference interpreter."""
    p = parameters(batch, seed)
    f = program(row, legal(row), nested)
    params = {network.name: single(p) for network in legal(row)}
    got = jax.jit(value_and_gradient(rlfx.compile(f, length=T, batch=batch)))(params)
    if reference:
        assert_close(got, value_and_gradient(rlfx.reference(f, length=T, batch=batch))(params), 5e-6)
    return errors(row, nested, p, *got)


@row_cases
def test_row(row: Row):
    compare(row, "plain", 2)


@pytest.mark.parametrize("nested", ["plain", "forward", "backward"])
def test_another_environment_at_a_traced_time(nested: str):
    compare(ACROSS, nested, 2)


@row_cases
def test_row_under_vmap_and_jit(row: Row):
    several = [parameters(None, seed) for seed in range(2)]
    compiled = rlfx.compile(program(row, legal(row), "plain"), length=T)
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *map(single, several))
    params = {network.name: stacked for network in legal(row)}
    got = jax.jit(jax.vmap(value_and_gradient(compiled)))(params)
    for i, p in enumerate(several):
        errors(row, "plain", p, *jax.tree.map(lambda g: g[i], got))


@pytest.mark.parametrize(
    ("row", "how"), met(ROWS, [("forward", None), ("backward", 2)]), ids=lambda x: getattr(x, "text", None) or x[0]
)
def test_row_inside_solve(row: Row, how: tuple[str, int | None]):
    nested, batch = how
    compare(row, nested, batch, seed=1, reference=nested == "forward")


@pytest.mark.slow
@row_cases
@pytest.mark.parametrize(("nested", "batch"), [("plain", None), ("forward", 2), ("backward", None), ("backward", 2)])
def test_row_and_its_reference_with_and_without_a_batch(row: Row, nested: str, batch: int | None):
    compare(row, nested, batch)


# -- recurrent rows: h[t + 1] = w h[t] --------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("way", ["carry", "solve"])
def test_linear_recurrence(way: str, batch: int | None):
    """``h[t + 1] = w h[t]``, ``loss = mean h[t] ** 2``: the gradient is known in closed form."""

    def by_carry(w, h, t):
        return h**2, w * h

    def by_solve(w, h, t):
        before = rlfx.solve(lambda s: jnp.where(t == 0, h, w * s[t - 1]), start=0.0)
        return before**2, h

    w, h = 1.1, np.asarray(0.7 if batch is None else [0.7, -1.2])
    fn = rlfx.compile(by_carry if way == "carry" else by_solve, length=T, batch=batch)
    run = lambda w, h: fn(w, h)[0]  # noqa: E731
    loss, (dw, dh) = jax.value_and_grad(run, (0, 1))(jnp.float32(w), jnp.asarray(h, jnp.float32))
    k = np.arange(T)
    np.testing.assert_allclose(loss, np.mean(h**2) * np.mean(w ** (2 * k)), rtol=1e-5)
    np.testing.assert_allclose(dw, np.mean(h**2) * np.mean(2 * k * w ** (2.0 * k - 1)), rtol=1e-5)
    np.testing.assert_allclose(dh, 2 * h / h.size * np.mean(w ** (2 * k)), rtol=1e-5)
    many = jax.vmap(jax.grad(run), (0, None))(jnp.array([w, 0.5]), jnp.asarray(h, jnp.float32))
    expected = [np.mean(h**2) * np.mean(2 * k * v ** (2.0 * k - 1)) for v in (w, 0.5)]
    np.testing.assert_allclose(many, expected, rtol=1e-5)


@pytest.mark.parametrize("batch", [None, 2])
def test_nonlinear_recurrence(batch: int | None):
    """A tanh cell through the carry, every parameter and input differentiated."""

    def f(p, carry, t):
        h = jnp.tanh(p["mix"] @ carry + p["encode"] @ rlfx.inputs(p["obs"])[t])
        return jnp.sum(h**2 * (p["query"] @ jnp.ones(FEATURES))), h

    def loop(p):
        obs = p["obs"] if batch else p["obs"][:, None]
        total = 0.0
        for b in range(obs.shape[1]):
            h = np.full(HIDDEN, 0.1)
            for t in range(T):
                h = np.tanh(p["mix"] @ h + p["encode"] @ obs[t, b])
                total += np.sum(h**2 * (p["query"] @ np.ones(FEATURES)))
        return total / (T * obs.shape[1])

    p = parameters(batch)
    carry = jnp.full((HIDDEN,) if batch is None else (batch, HIDDEN), 0.1)
    fn = rlfx.compile(f, length=T, batch=batch)
    assert_close(jax.value_and_grad(lambda q: fn(q, carry)[0])(single(p)), (loop(p), differences(loop, p)))


def table() -> str:
    """The rows of docs/access-table.md (B = 2): ``python -m tests.recurrence.test_access_table``."""
    heads = " | ".join(f"{n.name}: value, gradient" for n in NETWORKS)
    lines = [f"| phi | {heads} |", "| --- |" + " --- |" * len(NETWORKS)]
    print(*lines, sep="\n")
    for row in [*ROWS, ACROSS]:
        found = compare(row, "plain", 2)
        cells = [", ".join(f"{error:.0e}" for error in found.get(n.name, ())) or "(empty slices)" for n in NETWORKS]
        lines.append(f"| `{row.text}` | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    table()
