"""Bad input: every message states the fact, the user's own source line or argument, and the fix."""

import inspect
import pathlib
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import rlfx
from rlfx import envs
from rlfx.errors import (
    BoundaryError,
    CausalityError,
    DomainError,
    ProgramError,
    RlfxError,
    ScheduleError,
    UnsupportedSliceOp,
)

KEY = jax.random.key(0)


def refusal(error, f, *, carry=None, params=None, length=4, batch=None, key=None, **options):
    """The message with which a program is refused when it is called; it names the line of f marked ``# <-``."""
    with pytest.raises(error) as caught:
        rlfx.compile(f, length=length, batch=batch, **options)(params, carry, key)
    return checked(caught, f)


def checked(caught, f=None):
    message = str(caught.value)
    assert isinstance(caught.value, RlfxError)
    assert "\n  Fix: " in message
    lines, first = inspect.getsourcelines(f) if f is not None else ([], 0)
    marked = [first + i for i, line in enumerate(lines) if "# <-" in line]
    for number in marked:
        assert f"{pathlib.Path(__file__).name}:{number}" in message, f"no {number} in {message}"
    assert not re.search(r"rlfx/|/jax/|jaxpr|Traced<|site-packages", message), message
    return message


# -- causality --------------------------------------------------------------------------------------------------------


def test_a_cycle_that_mixes_past_and_future():
    def f(p, c, t):
        x = rlfx.solve(lambda x: x[t - 1] + x[t + 1], start=0.0, end=0.0)  # <-
        return x, c

    message = refusal(CausalityError, f)
    assert "circle that needs both the past and the future" in message
    assert "x[t - 1] reads the past" in message
    assert "x[t + 1] reads the future" in message
    assert "Break the circle" in message


def test_a_carry_computed_from_the_future():
    def f(p, c, t):
        x = rlfx.series(c, end=0.0)
        return c, x[t + 1] + 1.0  # <-

    message = refusal(CausalityError, f, carry=jnp.float32(0.0))
    assert "x[t + 1] reads the future" in message
    assert "stop carrying a value computed from the future" in message


def test_a_carry_normalised_by_all_timesteps():
    def f(p, c, t):
        return c, c - rlfx.mean(c, "t")  # <-

    message = refusal(CausalityError, f, carry=jnp.float32(0.0))
    assert "rlfx.mean over t needs every timestep" in message


def test_two_series_in_a_circle():
    def f(p, c, t):
        def outer(y):
            x = rlfx.series(rlfx.solve(lambda x: x[t - 1] + y[t + 1], start=0.0), end=0.0)  # <-
            return x[t] + 1.0

        return rlfx.solve(outer, end=0.0), c

    assert "both the past and the future" in refusal(CausalityError, f)


@pytest.mark.parametrize("index", ["t", "t - t % 2", "t // 2", ":t + 1"])
def test_a_value_that_depends_on_itself(index):
    read = {
        "t": lambda x, t: x[t],
        "t - t % 2": lambda x, t: x[t - t % 2],
        "t // 2": lambda x, t: x[t // 2],
        ":t + 1": lambda x, t: x[: t + 1].sum(),
    }[index]

    def f(p, c, t):
        return rlfx.solve(lambda x: 0.5 * read(x, t), start=0.0), c

    message = refusal(CausalityError, f)
    assert "A value at time t depends on itself at the same time" in message
    assert f"x[{index}]" in message
    assert "Read a strictly earlier or later timestep" in message


# -- boundaries -------------------------------------------------------------------------------------------------------


def test_a_read_before_the_start_without_a_value():
    def f(p, c, t):
        x = rlfx.series(1.0 * t)
        return x[t - 1], c  # <-

    message = refusal(BoundaryError, f)
    assert "x[t - 1] is read before the first timestep, and the series has no value there." in message
    assert "rlfx.series(v, start=...)" in message
    assert "x[rlfx.maximum(t - 1, 0)]" in message


def test_a_read_beyond_the_end_of_data():
    def f(p, c, t):
        x = rlfx.inputs(p)
        return x[t + 1], c  # <-

    message = refusal(BoundaryError, f, params=jnp.zeros(4))
    assert "x[t + 1] is read beyond the last timestep, T = 4, and cannot be evaluated there" in message
    assert "rlfx.inputs" in message
    assert "rlfx.series(v, end=...)" in message
    assert "x[rlfx.minimum(t + 1, t.length - 1)]" in message


def test_a_read_beyond_the_end_of_what_reads_other_timesteps():
    def f(p, c, t):
        x = rlfx.series(c)
        y = rlfx.series(x[rlfx.minimum(t + 1, t.length - 1)])
        return y[t + 1], c  # <-

    message = refusal(BoundaryError, f, carry=jnp.float32(0.0))
    assert "depends on another timestep, x[minimum(" in message


@pytest.mark.parametrize(
    "together", [lambda c: rlfx.max(c, "b"), lambda c: rlfx.shared(lambda v: v.sum(), c)], ids=["max", "shared"]
)
def test_a_read_beyond_the_end_of_what_environments_have_together_which_end_apart(together):
    def f(p, c, t):
        return rlfx.series(together(c))[t + 1], c  # <-

    with pytest.raises(BoundaryError) as error:
        rlfx.compile(f, length=4, batch=2, until=lambda c: c > 1.0)(None, jnp.zeros(2))
    assert "it depends on all environments, which end at different timesteps" in str(error.value)
    assert "rlfx.series(v, end=...)" in str(error.value)
    assert rlfx.compile(f, length=4, batch=2)(None, jnp.zeros(2))[0] == 0.0


def test_an_index_that_stays_inside_of_t_is_beyond_the_end_of_an_environment():
    def f(x, n, t):
        return rlfx.inputs(x)[rlfx.minimum(t + 2, t.length - 1)], n - 1  # <-

    until = lambda n: n <= 0  # noqa: E731
    message = refusal(BoundaryError, f, params=jnp.zeros((7, 2)), carry=jnp.array([3, 5]), length=7, batch=2, until=until)
    assert "x[minimum(t + 2, 6)] is read beyond the end of an environment (until=), and cannot be evaluated there" in message
    assert message.endswith("Fix: Give the series a value there, rlfx.series(v, end=...).")


def test_a_read_beyond_the_end_never_steps_the_environment():
    env = envs.make("CartPole-v1")

    def f(p, state, t):
        state, step = env.step(t.key_for("env"), state, jnp.int32(0))
        return rlfx.series(step.final_obs)[t + 1].sum(), state  # <-

    message = refusal(BoundaryError, f, carry=env.reset(KEY), key=KEY)
    assert "that would step the environment once more" in message


def test_solve_without_a_boundary():
    def f(p, c, t):
        return rlfx.solve(lambda x: x[t - 1]), c  # <-

    assert "rlfx.solve has no boundary value" in refusal(BoundaryError, f)


def test_solve_read_on_the_side_without_a_boundary():
    def f(p, c, t):
        return rlfx.solve(lambda x: x[t - 1] + 1.0, end=0.0), c  # <-

    assert "x[t - 1] is read before the first timestep" in refusal(BoundaryError, f)


def test_a_boundary_value_of_another_structure():
    def f(p, c, t):
        return rlfx.series(c, start={"b": 0.0})[t - 1]["a"], c  # <-

    assert "start= does not fit the series" in refusal(BoundaryError, f, carry={"a": jnp.float32(0.0)})


def test_a_boundary_value_of_another_shape():
    def f(p, c, t):
        return rlfx.series(c, end=jnp.zeros(3))[t + 1].sum(), c  # <-

    assert "end= does not fit the series" in refusal(BoundaryError, f, carry=jnp.zeros(2))


def test_a_float_boundary_of_an_integer_series():
    def f(p, c, t):
        return rlfx.series(t.now, start=0.5)[t - 1] * 1.0, c  # <-

    assert "its dtype is float32, the series' is int32" in refusal(BoundaryError, f)


def test_a_definition_whose_type_does_not_settle():
    def f(p, c, t):
        return rlfx.solve(lambda x: jnp.concatenate([x[t - 1], jnp.ones(1)]), start=jnp.ones(1)).sum(), c  # <-

    message = refusal(ProgramError, f)
    assert "does not settle" in message
    assert "start= or end=" in message


# -- indices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "fact"),
    [
        (lambda x, t: x[-1], "negative indices do not count from the end"),
        (lambda x, t: x[-2:], "negative indices do not count from the end"),
        (lambda x, t: x[t:-1], "negative indices do not count from the end"),
        (lambda x, t: x[1.5], "i is 1.5"),
        (lambda x, t: x[0.5 * t], "affine in t"),
        (lambda x, t: x["a"], "asked for 'a'"),
        (lambda x, t: x[None], "affine in t"),
        (lambda x, t: x[0.5 * t :], "A slice bound must be affine in t"),
        (lambda x, t: x[: jnp.arange(3)], "A slice bound must be affine in t"),
        (lambda x, t: x[t::-2], "The step of a slice of a series is a positive integer, got -2"),
        (lambda x, t: x[jnp.arange(2.0)], "affine in t"),
        (lambda x, t: x.window(1, 1), "window needs integers lo < hi, got lo=1, hi=1"),
        (lambda x, t: x.window(t - 1, t + 2), "They are offsets from t: window(-1, 2)."),
        (lambda x, t: x.window(0.5, 2), "Give both as integers, which are offsets from t: window(0, 5) begins at t."),
        (lambda x, t: x[t // 0], "The divisor of t must be a positive integer, got 0"),
        (lambda x, t: x[t % -2], "The divisor of t must be a positive integer, got -2"),
        (lambda x, t: x[jnp.int32(0), jnp.int32(0)], "this program has no batch"),
    ],
)
def test_an_index_that_is_not_affine(index, fact):
    def f(p, c, t):
        return jnp.sum(index(rlfx.series(1.0 * t, start=0.0, end=0.0), t)), c

    message = refusal(DomainError, f)
    assert fact in message
    assert "at test_errors.py:" in message


def test_comparing_a_series_or_using_it_as_an_array():
    for use in (
        lambda x: x + 1,
        lambda x: 2 * x,
        lambda x: x > 0,
        lambda x: -x,
        jnp.sin,
        len,
        bool,
        list,
        lambda x: jnp.ones(2) * x,
        lambda x: x == 1.0,
        lambda x: x != jnp.ones(2),
        lambda x: x == 1.0,
        lambda x: jnp.ones(2) != x,
        lambda x: x == x[0:],
    ):

        def f(p, c, t):
            return use(rlfx.series(1.0 * t)), c

        with pytest.raises(
            TypeError, match=r"A Series is not an array(.|\n)*at test_errors.py:\d+(.|\n)*Fix: Write x\[t\]"
        ):
            rlfx.compile(f, length=2)(None, None)


def test_a_series_is_itself_alone():
    """What is no array is compared as Python compares objects: with None, in dictionaries."""

    def f(p, c, t):
        x = rlfx.series(1.0 * t)
        return float(x != None) + len({x: 1, rlfx.series(c): 2}) + 0.0 * x[t], c  # noqa: E711

    assert float(rlfx.compile(f, length=2)(None, jnp.float32(0.0))[0]) == 3.0


def test_writing_to_a_series_and_asking_it_for_a_leaf():
    def writes(p, c, t):
        x = rlfx.series(c)
        x[t + 1] = 2.0
        return x[t], c

    def asks(p, c, t):
        return rlfx.series({"a": c})["a"][t], c

    with pytest.raises(TypeError, match=r"A Series cannot be written to(.|\n)*at test_errors.py:\d+(.|\n)*Fix: Choose before"):
        rlfx.compile(writes, length=2)(None, jnp.float32(0.0))
    with pytest.raises(RlfxError, match=r"asked for 'a'(.|\n)*at test_errors.py:\d+(.|\n)*Fix: (.|\n)*x\[t\]\['a'\]"):
        rlfx.compile(asks, length=2)(None, jnp.float32(0.0))


def test_a_history_that_is_none():
    with pytest.raises(RlfxError, match=r"history= of rlfx.series is a ring buffer(.|\n)*Fix: (.|\n)*rlfx.History\(capacity"):
        rlfx.compile(lambda p, c, t: (rlfx.series(c, history=c)[t], c), length=2)(None, jnp.float32(0.0))


def test_returning_a_series():
    def f(p, c, t):
        return 1.0 * t, c, rlfx.series(1.0 * t)

    with pytest.raises((RlfxError, TypeError), match=r"A Series is not an array|Series, which is not an array"):
        rlfx.compile(f, length=2)(None, None)


# -- slices of symbolic length ------------------------------------------------------------------------------------


#: A slice, one like it that may be empty, and a length that some of the first have and others do not.
CUTS = {
    "t:": lambda x, t: (x[t:], x[t + 1 :], 2),
    ":t + 1": lambda x, t: (x[: t + 1], x[:t], 2),
    "t:t + 2": lambda x, t: (x[t : t + 2], x[t + 1 : t + 3], 1),
    "t - t % 2:t + 1": lambda x, t: (x[t - t % 2 : t + 1], x[t - t % 2 : t], 1),
    "made of one": lambda x, t: (jnp.sin(x[t // 2 : t + 1]) * 2.0, jnp.cos(x[t // 2 + 1 : t + 1]), 2),
}


@pytest.mark.parametrize(
    "use",
    [
        lambda s, x, t: s[0].reshape(2, -1),
        lambda s, x, t: jnp.stack([s[0], x[t // 3 : t + 2]]),
        lambda s, x, t: s[0] + x[t // 3 : t + 2],
        lambda s, x, t: jnp.max(s[1]),
        lambda s, x, t: len(s[0]),
        lambda s, x, t: 1.0 if s[0].shape[0] > s[2] else 0.0,
        lambda s, x, t: jnp.fft.fft(s[0]).real,
        lambda s, x, t: jnp.linspace(0, 1, s[0].shape[0]),
        lambda s, x, t: jax.random.normal(t.key, s[0].shape),
        lambda s, x, t: next(iter(s[0])),
        lambda s, x, t: jnp.tile(s[0], 2),
    ],
    ids=["reshape", "stack", "add", "max of empty", "len", "if", "fft", "linspace", "random", "iterate", "tile"],
)  # fmt: skip
def test_an_operation_without_meaning_on_a_symbolic_length(use):
    """Each of five slices: 55 members."""
    for cut in CUTS.values():

        def f(p, c, t, cut=cut):
            x = rlfx.series(1.0 * t, start=0.0, end=0.0)
            return jnp.sum(use(cut(x, t), x, t)), c

        message = refusal(UnsupportedSliceOp, f, key=KEY)
        assert "at test_errors.py:" in message
        assert "x.window(lo, hi, fill=v)" in message


def test_ranks_that_differ_under_strict_promotion():
    def f(p, c, t):
        return jnp.sum(rlfx.series(c)[: t + 1] * c), c

    with (
        jax.numpy_rank_promotion("raise"),
        pytest.raises(ValueError, match=r"shapes \(\(t \+ 1\), 3\) \(3,\)") as caught,
    ):
        rlfx.trace(f, None, jnp.zeros(3), length=4)
    message = str(caught.value)
    assert "at test_errors.py:" in message
    assert "jax_numpy_rank_promotion" in message
    assert "Fix: Give both as many axes" in message


def test_returning_a_slice():
    def f(p, c, t):
        return 1.0 * t, c, rlfx.series(1.0 * t)[t:]

    message = refusal(UnsupportedSliceOp, f)
    assert "whose length depends on t" in message
    assert "x.window(lo, hi, fill=v)" in message


# -- the carry and the arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("following", "fact"),
    [
        (lambda c: {**c, "n": c["n"] + 0.5}, "carry['n'] comes back as f32[], and it was given as i32[]"),
        (
            lambda c: {**c, "obs": (c["obs"][0], jnp.zeros(3))},
            "carry['obs'][1] comes back as f32[3], and it was given as f32[2]",
        ),
        (lambda c: {**c, "obs": (c["obs"][0], 0.0)}, "carry['obs'][1] comes back as f32[], and it was given as f32[2]"),
        (lambda c: {"n": c["n"]}, "another structure than the carry it was given"),
        (lambda c: (c["n"], c["obs"]), "another structure than the carry it was given"),
        (lambda c: None, "another structure than the carry it was given"),
    ],
)
def test_a_carry_that_comes_back_different(following, fact):
    def f(p, c, t):
        return 1.0 * t, following(c)

    carry = {"n": jnp.int32(0), "obs": (jnp.float32(0.0), jnp.zeros(2))}
    with jax.numpy_dtype_promotion("standard"):
        message = refusal(ProgramError, f, carry=carry)
    assert fact in message
    assert "at test_errors.py:" in message


@pytest.mark.parametrize(
    ("carry", "fact"),
    [
        (
            {"env": {"x": jnp.zeros(3)}},
            "carry['env']['x'] has shape [3]; every leaf of the carry needs a leading axis of batch=2",
        ),
        ({"env": {"x": jnp.float32(0.0)}}, "carry['env']['x'] has shape []"),
        ({"env": {"x": jnp.zeros((3, 2))}}, "carry['env']['x'] has shape [3, 2]"),
    ],
)
def test_a_batch_axis_of_the_wrong_size(carry, fact):
    message = refusal(ProgramError, lambda p, c, t: (1.0 * t, c), carry=carry, batch=2)
    assert fact in message
    assert "rlfx.Shared" in message


def test_a_carry_that_is_no_array():
    message = refusal(ProgramError, lambda p, c, t: (1.0 * t, c), carry={"env": "CartPole"})
    assert "carry['env'] is str ('CartPole'), not an array" in message
    assert "close over it" in message


def test_params_that_are_no_arrays():
    assert "params['f'] is function" in refusal(ProgramError, lambda p, c, t: (1.0 * t, c), params={"f": lambda: 0})


def test_a_missing_key():
    def f(p, c, t):
        return jax.random.uniform(t.key_for("action")), c  # <-

    message = refusal(ProgramError, f)
    assert "uses random keys, but no key was given" in message
    assert "loss_fn(params, carry, jax.random.key(0))" in message


@pytest.mark.parametrize(
    ("key", "fact"),
    [
        (jnp.float32(0.0), "key is f32[], not a random key"),
        (jnp.zeros(2, jnp.int32), "key is i32[2], not a random key"),
        (jax.random.split(KEY, 3), "key has shape [3]; a program takes one key"),
        (7, "key is i32[], not a random key"),
    ],
)
def test_an_unusable_key(key, fact):
    assert fact in refusal(ProgramError, lambda p, c, t: (1.0 * t, c), key=key)


def test_a_name_of_a_key_that_is_no_string():
    assert "t.key_for takes a name (str), got 3" in refusal(
        ProgramError, lambda p, c, t: (jax.random.uniform(t.key_for(3)), c), key=KEY
    )


def test_data_of_another_length():
    def f(p, c, t):
        return rlfx.inputs(p)[t]["x"], c  # <-

    message = refusal(DomainError, f, params={"x": jnp.zeros((5, 2))}, batch=2)
    assert "rlfx.inputs(xs)['x'] has shape (5, 2); its leading axes must be [4, 2] (t, b)" in message
    assert 'axes="t"' in message


def test_unknown_axes():
    assert 'rlfx.inputs: axes must be "tb", "t" or "b", got \'bt\'' in refusal(
        DomainError, lambda p, c, t: (rlfx.inputs(p, axes="bt")[t], c), params=jnp.zeros(4)
    )
    data = {"x": jnp.zeros(4), "y": jnp.zeros(4)}
    message = refusal(DomainError, lambda p, c, t: (rlfx.inputs(p, axes={"x": "t", "z": "t"})[t]["x"], c), params=data)
    assert "rlfx.inputs: axes={'x': 't', 'z': 't'} is not how the data begin, PyTreeDef({'x': *, 'y': *})" in message
    assert 'axes={"obs": "tb", "weight": "b"}' in message
    assert 'rlfx.inputs: axes must be "tb", "t" or "b", got 3' in refusal(
        DomainError, lambda p, c, t: (rlfx.inputs(p, axes={"x": "t", "y": 3})[t]["x"], c), params=data
    )
    assert 'rlfx.mean: over must be "t", "b" or both, got \'x\'' in refusal(
        DomainError, lambda p, c, t: (rlfx.mean(1.0 * t, "x"), c)
    )
    assert "rlfx.every: n must be a positive integer, got 0" in refusal(
        DomainError, lambda p, c, t: (rlfx.every(0, lambda: 1.0, otherwise=0.0), c)
    )


def test_a_shared_carry_that_varies_with_the_environment():
    def f(p, c, t):
        return c["x"], {"x": c["x"], "m": c["m"] + c["x"]}  # <-

    message = refusal(ProgramError, f, carry={"x": jnp.zeros(2), "m": rlfx.Shared(jnp.float32(0.0))}, batch=2)
    assert "carry['m'] is Shared by all environments, but its next value varies" in message
    assert 'rlfx.mean(x, over="b")' in message


# -- what a program returns -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "fact"),
    [
        (lambda c: 1.0, "The program returned float, not (loss, carry) or (loss, carry, aux)"),
        (lambda c: (1.0,), "returned a tuple of 1"),
        (lambda c: (1.0, c, 2, 3), "returned a tuple of 4"),
        (lambda c: (jnp.zeros(2), c), "The loss of one timestep of one environment is a float scalar; it is f32[2]"),
        (lambda c: (1, c), "float scalar; it is i32[]"),
        (lambda c: (1.0, c, "text"), "returned str, which is not an array"),
    ],
)
def test_results_of_another_form(result, fact):
    def f(p, c, t):
        return result(c)

    assert fact in refusal(ProgramError, f)


def test_a_condition_that_is_no_boolean():
    f = lambda p, c, t: (1.0 * t, c)  # noqa: E731
    assert "until(carry) must be a boolean scalar" in refusal(
        ProgramError, f, carry=jnp.float32(0.0), until=lambda c: c
    )
    with pytest.raises(DomainError, match=r"until must be a function of \(carry\) or None, got 3"):
        rlfx.compile(f, length=3, until=3)


# -- the domain -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [rlfx.compile, rlfx.unroll, rlfx.reference])
@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"length": 0}, "length must be a positive integer, got 0"),
        ({"length": -3}, "length must be a positive integer, got -3"),
        ({"length": 2.0}, "length must be a positive integer, got 2.0"),
        ({"length": True}, "length must be a positive integer, got True"),
        ({"length": "10"}, "length must be a positive integer, got '10'"),
        ({"length": None}, "length must be a positive integer, got None"),
        ({"length": 3, "batch": 0}, "batch must be a positive integer or None, got 0"),
        ({"length": 3, "batch": 1.5}, "batch must be a positive integer or None, got 1.5"),
    ],
)
def test_lengths_and_batches(make, options, fact):
    with pytest.raises(DomainError) as caught:
        make(lambda p, c, t: (1.0, c), **options)
    assert fact in checked(caught)


def test_an_unknown_reduction_of_the_loss():
    with pytest.raises(ProgramError, match='reduce must be "mean" or "sum", got \'max\''):
        rlfx.compile(lambda p, c, t: (1.0, c), length=2, reduce="max")


# -- outside of a program ---------------------------------------------------------------------------------------------


STEP = SimpleNamespace(reward=0.0, terminated=False, truncated=False, final_obs=0.0)


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda: rlfx.series(1.0), "rlfx.series"),
        (lambda: rlfx.solve(lambda x: x, start=0.0), "rlfx.solve"),
        (lambda: rlfx.inputs(jnp.zeros(3)), "rlfx.inputs"),
        (lambda: rlfx.mean(1.0), "rlfx.mean"),
        (lambda: rlfx.last(1.0), "rlfx.last"),
        (lambda: rlfx.std(1.0), "rlfx.mean"),
        (lambda: rlfx.every(2, lambda: 1, otherwise=0), "rlfx.every"),
        (lambda: rlfx.shared(jnp.sum, 1.0), "rlfx.shared"),
        (lambda: rlfx.discounted_sum(jnp.zeros(3), 0.9), "rlfx.discounted_sum"),
        (lambda: rlfx.gae(STEP, 0.0, 0.0, gamma=0.9, lam=0.9), "rlfx.gae"),
        (lambda: rlfx.lambda_return(STEP, 0.0, gamma=0.9, lam=0.9), "rlfx.lambda_return"),
        (lambda: rlfx.next_value(lambda obs: 0.0, STEP, 0.0), "rlfx.next_value"),
    ],
)
def test_the_language_outside_of_a_program(use, name):
    with pytest.raises(ProgramError) as caught:
        use()
    message = checked(caught)
    assert f"{name} has a meaning only inside a per-timestep program" in message
    assert "at test_errors.py:" in message


def test_a_series_kept_for_later():
    kept = []

    def f(p, c, t):
        kept.append(rlfx.series(1.0 * t, start=0.0))
        kept.append(t)
        return 1.0 * t, c

    rlfx.compile(f, length=2)(None, None)
    with pytest.raises((RlfxError, jax.errors.UnexpectedTracerError)):
        kept[0][kept[1] - 1]


def test_a_value_that_leaks_into_another_trace():
    kept = []

    def f(p, c, t):
        kept.append(p + 1.0)  # <-
        return p * kept[0], c

    compiled = rlfx.compile(f, length=2)
    compiled(jnp.float32(1.0), None)
    with pytest.raises(ProgramError) as caught:
        compiled(jnp.zeros(1).astype(jnp.float32)[0], jnp.float32(0.0))
    message = checked(caught, f)
    assert "leaked out of the traced program" in message
    assert "Return it from the program as aux" in message


def test_differentiating_a_read_inside_the_program():
    def f(p, c, t):
        x = rlfx.series(c, end=0.0)
        return jax.grad(lambda w: w * rlfx.series(w * c, end=0.0)[t + 1])(p) + x[t], c  # <-

    message = refusal(ProgramError, f, params=jnp.float32(1.0), carry=jnp.float32(2.0))
    assert "jax.grad inside the program differentiates through a read of other timesteps" in message
    assert "Differentiate the compiled program" in message


def test_a_read_inside_a_loop_without_a_count():
    def f(p, c, t):
        x = rlfx.series(1.0 * t)
        return jax.lax.while_loop(lambda a: a < 10, lambda a: a + x[t] + 1.0, jnp.float32(0.0)), c  # <-

    message = refusal(ProgramError, f)
    assert (
        "Another timestep is read inside of a loop without a known count (jax.lax.while_loop or fori_loop)" in message
    )
    assert "Read it before, v = x[t - 1], and use v inside." in message


def test_a_read_inside_a_loop_that_cannot_be_moved_out():
    def f(p, c, t):
        def body(a, _):
            return a + rlfx.series(a, end=0.0)[t + 1], None

        return jax.lax.scan(body, jnp.float32(0.0), None, length=2)[0], c  # <-

    message = refusal(ProgramError, f)
    assert "A series is named and read inside of a loop (jax.lax.scan, map or fori_loop)" in message
    assert "Name and read it before, v = rlfx.series(a)[t - 1], and use v inside." in message


@pytest.mark.parametrize(
    ("use", "fact"),
    [
        (lambda t: rlfx.discounted_sum(1.0, 0.9), "takes a slice of rewards, got a scalar"),
        (lambda t: rlfx.discounted_sum(jnp.zeros(3), jnp.zeros(2)), "takes the discounts of the same timesteps"),
        (
            lambda t: rlfx.gae(1.0, 0.0, 0.0, gamma=0.9, lam=0.9),
            "gae takes the environment's Step; this float has no reward",
        ),
    ],
)
def test_bad_arguments_of_returns(use, fact):
    message = refusal(ProgramError, lambda p, c, t: (use(t), c))
    assert fact in message
    assert "at test_errors.py:" in message


@pytest.mark.parametrize(("form", "text"), [
    (rlfx.Plan("blocks", 2, environments=3), "there is no batch.\n  at test_errors.py:{}\n  Fix: Leave environments= out"),
    (rlfx.Plan("one pass"), "flows through no recurrence{}\n  Fix: Leave the plan to the compiler. Where a gradient"),
])  # fmt: skip
def test_what_a_plan_lacks_is_what_is_to_be_given(form, text):
    fn = rlfx.compile(lambda p, c, t: (p * t.astype(jnp.float32), c), length=4, plan=form)
    with pytest.raises(ScheduleError, match=text.format("(.|\\n)*")):
        jax.grad(lambda p: fn(p, 0.0)[0])(1.0)


@pytest.mark.parametrize("make", [
    lambda: rlfx.Plan.from_json('{"form": "blocks"}'), lambda: rlfx.envs.make("CartPole-v1", max_steps_in_episode=0)
])  # fmt: skip
def test_what_a_function_of_the_library_makes_is_refused_at_the_users_line(make):
    with pytest.raises(RlfxError, match=r"at test_errors\.py:"):
        make()


@pytest.mark.parametrize(("more", "named"), [({"memory_budget": 2**20}, "memory_budget="), ({"autotune": True}, "autotune=")])
def test_a_plan_that_is_given_leaves_nothing_to_choose(more, named):
    with pytest.raises(ScheduleError, match=rf"plan= is given beside {named}(.|\n)*at test_errors\.py(.|\n)*Leave one of"):
        rlfx.compile(lambda p, c, t: (p, c), length=4, plan=rlfx.Plan("blocks", 2), **more)


def test_incrementalize_counts_its_sizes():
    with pytest.raises(DomainError, match=r"over='tb' takes 2 block sizes, got 1: 2\."):
        rlfx.incrementalize(lambda p, c, t: (p, c), over="tb", block_size=2)
