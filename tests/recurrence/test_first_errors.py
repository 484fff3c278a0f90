"""Errors that users meet first: the text names their argument or line, the fact, and a fix that works."""

import itertools
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

import rlfx
from rlfx import envs
from rlfx.errors import DomainError, ProgramError, ProgramTypeError, ScheduleError, UnsupportedSliceOp

KEY = jax.random.key(0)
HERE = f"at {pathlib.Path(__file__).name}:"
T = 4


@pytest.fixture(autouse=True)
def usual_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def message(error, call):
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert "\n  Fix: " in text
    return text


def traced(f, params=None, carry=None, *, batch=None, length=T):
    return rlfx.trace(f, params, carry, length=length, batch=batch)


# -- batch= forgotten -------------------------------------------------------------------------------------------------

#: Programs of one environment, whose carry is a number.
SCALAR_PROGRAMS = {
    "loss": lambda p, c, t: (c * p, c),
    "where": lambda p, c, t: (jnp.where(c > 0, c, p), 0.9 * c),
    "cond": lambda p, c, t: (jax.lax.cond(c > 0, lambda: c, lambda: -c), c),
    "while": lambda p, c, t: (jax.lax.while_loop(lambda a: a < 3.0, lambda a: a + 1.0, c), c),
    "switch": lambda p, c, t: (jax.lax.switch(c.astype(int), [lambda: 0.0, lambda: 1.0]), c),
    "clock": lambda p, c, t: (1.0 * t, (c + 1.0).reshape(())),
    "index": lambda p, c, t: (jnp.arange(3.0)[c.astype(int)], c),
    "series": lambda p, c, t: (rlfx.series(c, end=0.0)[t + 1], c),
    "past": lambda p, c, t: (rlfx.series(c)[: t + 1].sum(0), c),
    "solve": lambda p, c, t: (rlfx.solve(lambda x: c + 0.5 * x[t + 1], end=0.0), c),
    "key": lambda p, c, t: (c + jax.random.normal(t.key, ()), c),
    "concatenate": lambda p, c, t: (jnp.stack([c, p]).sum(), c),
    "every": lambda p, c, t: (rlfx.every(2, lambda: c, otherwise=0.0), c),
}


@pytest.mark.parametrize("name", SCALAR_PROGRAMS)
def test_a_forgotten_batch(name):
    f = SCALAR_PROGRAMS[name]
    for batch, carry in itertools.product((2, 3), (jnp.ones, lambda n: jnp.arange(1.0 * n))):
        text = message(ProgramError, lambda f=f, c=carry(batch): traced(f, jnp.float32(1.0), c))
        assert f"Every leaf of the carry has a leading axis of {batch}" in text
        assert f"Fix: Give batch={batch}, if they are environments." in text
        assert HERE in text
        traced(f, jnp.float32(1.0), carry(batch), batch=batch)  # the fix works


def test_a_forgotten_batch_of_environments():
    env = envs.make("CartPole-v1")

    def f(params, state, t):
        state, step = env.step(t.key, state, jnp.int32(0))
        return step.reward, state

    states = jax.vmap(env.reset)(jax.random.split(KEY, 3))
    assert "Fix: Give batch=3" in message(ProgramError, lambda: rlfx.compile(f, length=T)(None, states, KEY))
    assert "Fix: Give batch=3" in message(ProgramError, lambda: rlfx.reference(f, length=T)(None, states, KEY))
    traced(f, None, states, batch=3)


def test_another_reason_keeps_its_own_words():
    wrong = lambda p, c, t: (jnp.zeros(2), c)  # noqa: E731
    assert "batch=" not in message(ProgramError, lambda: traced(wrong, None, jnp.ones(3)))
    other = lambda p, c, t: (c[0], c)  # noqa: E731
    assert "batch=" not in message(ProgramError, lambda: traced(other, None, (jnp.ones(3), jnp.ones(4))))
    text = message(ProgramError, lambda: traced(SCALAR_PROGRAMS["loss"], jnp.float32(1.0), jnp.ones(3)))
    assert "it is f32[3]" in text
    assert "If not: Reduce it in the program" in text
    with pytest.raises(ZeroDivisionError):
        traced(lambda p, c, t: (1 / 0, c), None, jnp.ones(3))


# -- a slice meets an array of all timesteps ------------------------------------------------------------------------

W = jnp.arange(1.0 * T)
TOGETHER = {
    "*": lambda s, w: s * w,
    "r*": lambda s, w: w * s,
    "-": lambda s, w: s - w,
    "**": lambda s, w: s**w,
    "<": lambda s, w: (s < w) * 1.0,
    "@": lambda s, w: s @ w,
    "r@": lambda s, w: w @ s,
    "dot": jnp.dot,
    "vdot": jnp.vdot,
    "where": lambda s, w: jnp.where(w > 1, s, 0.0),
    "minimum": jnp.minimum,
    "stack": lambda s, w: jnp.stack([s, w]),
    "select": lambda s, w: jax.lax.select(w > 1, s, w),
    "add": jax.lax.add,
}
CUTS = {
    "[t:]": lambda x, t: x[t:],
    "[:t + 1]": lambda x, t: x[: t + 1],
    "[:t]": lambda x, t: x[:t],
    "[t + 1:]": lambda x, t: x[t + 1 :],
}


@pytest.mark.parametrize("name", TOGETHER)
def test_a_slice_meets_an_array_of_all_timesteps(name):
    for cut in CUTS.values():

        def f(p, c, t, cut=cut):
            return jnp.sum(TOGETHER[name](cut(rlfx.series(c), t), W)), c

        def fixed(p, c, t, cut=cut):
            return jnp.sum(TOGETHER[name](cut(rlfx.series(c), t), cut(rlfx.inputs(W, axes="t"), t))), c

        text = message(UnsupportedSliceOp, lambda f=f: traced(f, None, jnp.float32(1.0)))
        assert f"meets an array of the fixed length T={T}" in text
        assert HERE in text
        assert 'rlfx.inputs(w, axes="t")[:t + 1] for w' in text
        assert "tau" not in text
        traced(fixed, None, jnp.float32(1.0))  # the fix works


def test_positions_in_a_slice():
    def f(p, c, t):
        return (0.9 ** (rlfx.series(t.now)[t:] - t) * rlfx.series(c)[t:]).sum(), c

    assert rlfx.compile(f, length=T, reduce="sum")(None, jnp.float32(1.0))[0] == pytest.approx(
        sum(0.9**k for t in range(T) for k in range(T - t))
    )


# -- what the user's functions return ----------------------------------------------------------------------------------


def update_returns(result, carry=0.0):
    data = jnp.ones((4, 2))
    return lambda: rlfx.minibatch_epochs(lambda c, x: result(c), carry, data, epochs=1, minibatches=2, key=KEY)


def in_program(call):
    return lambda: traced(lambda p, c, t: (call(c, t), c), None, jnp.float32(1.0))


class Step:
    def __init__(self, reward, terminated=False, truncated=False, final_obs=0.0):
        self.reward, self.terminated = reward, jnp.asarray(terminated)
        self.truncated, self.final_obs = jnp.asarray(truncated), final_obs


@pytest.mark.parametrize(
    ("error", "call", "fact"),
    [
        (ProgramError, lambda: traced(lambda p, c, t: (None, c)), "it is None."),
        (ProgramError, lambda: traced(lambda p, c, t: ("a", c)), "returned str, which is not an array: 'a'"),
        (ProgramError, lambda: traced(lambda p, c, t: (rlfx.series(1.0 * t), c)), "returned a Series, which is not an array"),
        (ProgramError, lambda: traced(lambda p, c, t: (0.0, c, len)), "returned builtin_function_or_method"),
        (ProgramError, update_returns(lambda c: c), "update returned"),
        (ProgramError, update_returns(lambda c: (c, c, c)), "update returned tuple, not (carry, aux)"),
        (ProgramError, update_returns(lambda c: ((c, c), 0.0)), "The carry that update returns has the structure"),
        (ProgramError, update_returns(lambda c: (jnp.ones(2), 0.0)), "The carry that update returns is f32[2], "),
        (ProgramError, update_returns(lambda c: (c > 0, 0.0), jnp.float32(0)), "is bool[], the carry that it was given is f32[]"),
        (ProgramError, in_program(lambda c, t: rlfx.every(2, lambda: (c, c), otherwise=c)), "every returns has the"),
        (ProgramError, in_program(lambda c, t: rlfx.every(2, lambda: c, otherwise=0)), "returns is f32[], otherwise is i32[]"),
        (ProgramError, in_program(lambda c, t: rlfx.every(2, lambda: jnp.ones(2), otherwise=c)), "returns is f32[2], "),
        (ProgramError, in_program(lambda c, t: rlfx.every(2, lambda: "a", otherwise=c)), "returns must be arrays, got 'a'"),
        (
            ProgramError,
            in_program(lambda c, t: rlfx.next_value(lambda obs: jnp.ones(2), Step(c), c)),
            "What critic returns on step.final_obs is f32[2], value is f32[]",
        ),
        (ProgramError, in_program(lambda c, t: rlfx.gae(Step(c, 1.0), c, c, gamma=0.9, lam=0.9)), "has f32[] for terminated"),
        (
            ProgramError,
            in_program(lambda c, t: rlfx.gae(Step(c), jnp.ones(2), jnp.ones(3), gamma=0.9, lam=0.9).sum()),
            "do not go together: reward [], value [2], next_value [3]",
        ),
        (
            ProgramError,
            lambda: rlfx.compile(lambda p, c, t: (1.0, c), length=2, transform=lambda p: None)(None, None),
            "What transform returns must be a program, got None",
        ),
        (
            ProgramError,
            lambda: rlfx.compile(lambda p, c, t: (1.0, c), length=2, until=lambda c: "a")(None, None),
            "returned str, which is not an array",
        ),
        (
            DomainError,
            lambda: rlfx.minibatch_epochs(
                lambda c, x: (c, x), 0.0, jnp.ones((4, 2)), epochs=1, minibatches=2, key=KEY, shuffle=lambda k, n: k
            ),
            "shuffle(key, 8) returned key",
        ),
    ],
)  # fmt: skip
def test_what_a_function_of_the_users_returns(error, call, fact):
    text = message(error, call)
    assert fact in text
    assert HERE in text


# -- arguments of what was made before --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        ((1, jnp.ones(3)), "params is i32[]; f was traced with f32[]"),
        ((jnp.ones(2), jnp.ones(3)), "params is f32[2]; f was traced with f32[]"),
        (((1.0, 2.0), jnp.ones(3)), "params has the structure"),
        ((1.0, jnp.ones((3, 2))), "carry is f32[2]; f was traced with f32[]"),
        ((1.0, jnp.arange(3)), "carry is i32[]; f was traced with f32[]"),
        ((1.0, {"a": jnp.ones(3)}), "carry has the structure"),
    ],
)
def test_a_lowered_program_is_called_with_what_it_was_traced_for(given, fact):
    def f(p, c, t):
        return c * p, c

    program = traced(f, jnp.float32(1.0), jnp.ones(3), batch=3)
    assert fact in message(ProgramError, lambda: rlfx.lower(program)(*given))
    assert fact in message(ProgramError, lambda: rlfx.reference(program)(*given))
    assert rlfx.lower(program)(1.0, jnp.ones(3))[0] == 1.0


@pytest.mark.parametrize("t0", [1.5, jnp.float32(1.0), jnp.arange(2), "a", True, None])
def test_the_first_time_is_an_integer(t0):
    loss_fn = rlfx.compile(lambda p, c, t: (1.0 * t, c), length=2)
    assert "the time of the first timestep, an integer; it is" in message(
        DomainError, lambda: loss_fn(None, None, t0=t0)
    )
    assert "more than an int32 counts" in message(DomainError, lambda: loss_fn(None, None, t0=2**31))


def test_the_first_time_may_be_traced_and_is_not_waited_for():
    loss_fn = rlfx.compile(lambda p, c, t: (1.0 * t, c), length=2)
    assert jax.jit(lambda t0: loss_fn(None, None, t0=t0)[0])(4) == loss_fn(None, None, t0=jnp.int32(4))[0] == 4.5
    outer = rlfx.compile(lambda p, c, t: (loss_fn(None, None, t0=t)[0], c), length=3)
    assert outer(None, None, t0=5)[0] == 6.5
    with pytest.raises(DomainError, match=r"t0 is the time of the first timestep, an integer; it is f32\[\]"):
        jax.jit(lambda t0: loss_fn(None, None, t0=t0)[0])(4.0)


@pytest.mark.parametrize("f", [3, "f", None, lambda: 0, lambda p, c: 0, lambda p, c, t, more: 0])
def test_a_program_is_a_function_of_params_carry_and_time(f):
    for make in (rlfx.compile, rlfx.unroll, rlfx.reference):
        assert "must be a function of (params, carry, t), got" in message(ProgramError, lambda m=make: m(f, length=2))
    for make in (
        rlfx.vectorize,
        lambda f: rlfx.incrementalize(f, over="t", block_size=2),
        lambda f: rlfx.offload(f, min_bytes=1),
    ):
        assert "must be a program, or a function of (params" in message(ProgramError, lambda m=make: m(f))


@pytest.mark.parametrize(
    ("transform", "given", "fact"),
    [
        (rlfx.incrementalize, {"block_size": 2, "blocks": 2}, "incrementalize: blocks= is for functions of a batch"),
        (rlfx.incrementalize, {"block_size": 2, "strict": True}, "strict= is for functions of a batch"),
        (rlfx.incrementalize, {"block_size": 2, "batch_argnums": 0}, "batch_argnums= is for functions of a batch"),
        (rlfx.offload, {"min_bytes": 1, "block_size": 2}, "offload: block_size= is for functions of a batch"),
        (rlfx.offload, {"min_bytes": 1, "form": "driver"}, "form= is for functions of a batch"),
        (rlfx.offload, {"names": "obs"}, "names must be a list of names, got 'obs'"),
        (rlfx.offload, {"min_bytes": -1}, "min_bytes must be an integer >= 0 or None, got -1"),
    ],
)
def test_arguments_that_would_be_dropped(transform, given, fact):
    def f(p, c, t):
        return c * p, c

    over = {"over": "t"} if transform is rlfx.incrementalize else {}
    assert fact in message(DomainError, lambda: transform(f, **over, **given))
    assert fact in message(DomainError, lambda: transform(traced(f, jnp.float32(1.0), jnp.float32(1.0)), **given))


def test_forward_mode_is_an_error_of_ours():
    loss_fn = rlfx.compile(lambda p, c, t: (p * c, c), length=2)
    with pytest.raises(TypeError, match="reverse-mode derivatives only") as caught:
        jax.jvp(lambda p: loss_fn(p, jnp.float32(1.0))[0], (1.0,), (1.0,))
    assert isinstance(caught.value, ProgramError)


@pytest.mark.parametrize(
    ("use", "fact"),
    [
        (lambda x, t: (x[t:] + x[: t + 1]).sum(), "Two slices of other timesteps meet, whose lengths depend on t"),
        (lambda x, t: (x[t : t + 3] * x[t:]).sum(), "Two slices of other timesteps meet, whose lengths depend on t"),
        (lambda x, t: x[t:].sum() * len(x[t:]), "len, range or int asks for the length of a slice"),
        (lambda x, t: rlfx.mean(x[t:]), "rlfx.mean of a value whose length depends on t"),
        (lambda x, t: x[t:], "The program returns a slice whose length depends on t, f32["),
        (lambda x, t: x[t:][x[t:] > 0.2].sum(), "A boolean mask as an index selects as many elements as it has True"),
        (lambda x, t: x[x[t:] > 0.2].sum(), "i is a boolean, and a series is indexed by time"),
        (lambda x, t: x[jnp.arange(4) > 2].sum(), "i is a boolean, and a series is indexed by time"),
    ],
)
def test_what_slices_are_asked_for(use, fact):
    def f(p, c, t):
        return use(rlfx.series(p * c), t), c

    text = message((ProgramError, UnsupportedSliceOp), lambda: traced(f, jnp.float32(1.0), jnp.float32(1.0)))
    assert fact in text
    assert HERE in text
    assert "tau" not in text


@pytest.mark.parametrize("batch", [None, 3])
def test_ordered_callbacks_of_what_has_no_order(batch):
    def f(p, c, t):
        x = rlfx.series(p * c)[t + 1] if batch is None else p * c
        io_callback(lambda v: None, None, x, ordered=True)
        return p * c, c + jnp.float32(1.0)

    carry = jnp.float32(1.0) if batch is None else jnp.ones(batch, jnp.float32)
    loss = lambda p: rlfx.compile(f, length=T, batch=batch)(p, carry)[0]  # noqa: E731
    for call in (loss, jax.grad(loss)):
        text = message(ProgramError, lambda call=call: call(jnp.float32(1.0)))
        assert "An ordered io_callback" in text
        assert "rlfx.effect" in text
        assert HERE in text


def test_a_history_that_is_written_and_not_returned():
    def program(returned):
        def f(_, carry, t):
            x = rlfx.series(1.0 * t, history=carry["memory"])
            return {"memory": returned(x, carry)}, x.lookup(t - 2)

        carry = {"memory": rlfx.History(3, jnp.float32(0.0))}
        return rlfx.unroll(f, length=T)(None, carry)[0]["memory"].data.tolist()

    text = message(ProgramError, lambda: program(lambda x, carry: carry["memory"]))
    assert "written to the history carry['memory'], and the program returns carry['memory'] as it was" in text
    assert HERE in text
    assert program(lambda x, carry: x.history) == [3.0, 1.0, 2.0]


def test_a_history_that_nothing_is_written_to_goes_by():
    memory = rlfx.History(3, jnp.float32(0.0))
    assert rlfx.unroll(lambda _, carry, t: (carry, t.now), length=T)(None, memory)[0].data.tolist() == [0.0] * 3


def test_a_plan_names_the_line_on_which_it_is_made():
    text = message(ScheduleError, lambda: rlfx.Plan("blocks", True))
    assert "Plan: block must be a positive integer or None, got True." in text
    assert HERE in text


@pytest.mark.parametrize("use", [lambda s: s["w"], lambda s: s[0], lambda s: list(s)])
def test_a_shared_part_is_read_by_its_value(use):
    text = message(ProgramTypeError, lambda: use(rlfx.Shared({"w": jnp.ones(2)})))
    assert "A Shared is read as if it were what it wraps" in text
    assert "Fix: Read its value: carry.params.value." in text
    assert HERE in text
