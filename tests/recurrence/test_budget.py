"""A memory budget, and stored values in host memory: the results stay the same, the bytes fall where they should."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

import rlfx
from rlfx.errors import DomainError, MemoryBudgetError, ScheduleError
from rlfx.recurrence.memory.estimate import estimate_temp_bytes
from rlfx.recurrence.plan import budget
from rlfx.recurrence.plan.evaluator import PlanEvaluator
from tests.sampling import spread

pytestmark = pytest.mark.optimised

LENGTH, BATCH, SIZE = 64, 16, 256


def program(params, obs, t):
    """Large observations, Monte-Carlo returns."""
    obs = checkpoint_name(obs, "obs")
    hidden = jnp.tanh(params["w"] @ obs)
    action = jax.random.categorical(t.key_for("action"), hidden)
    moved = jax.lax.stop_gradient(jnp.roll(obs, 1) * 0.9 + 0.1 * jax.random.normal(t.key_for("env"), (1,)))
    reward = rlfx.series(moved[0] + action.astype(jnp.float32))
    returns = jax.lax.stop_gradient(rlfx.discounted_sum(reward[t:], jnp.full_like(reward[t:], 0.9)))
    return -jax.nn.log_softmax(hidden)[action] * returns, moved


def n_step(params, obs, t):
    """The same, with returns over five timesteps."""
    hidden = jnp.tanh(params["w"] @ obs)
    action = jax.random.categorical(t.key_for("action"), hidden)
    moved = jax.lax.stop_gradient(jnp.roll(obs, 1) * 0.9 + 0.1 * jax.random.normal(t.key_for("env"), (1,)))
    reward = rlfx.series(moved[0] + action.astype(jnp.float32))
    returns = rlfx.discounted_sum(reward[t : t + 5], jnp.full_like(reward[t : t + 5], 0.9))
    return -jax.nn.log_softmax(hidden)[action] * jax.lax.stop_gradient(returns), moved


def arguments():
    w = np.random.RandomState(0).randn(32, SIZE).astype(np.float32) / SIZE**0.5
    return {"w": jnp.asarray(w)}, jnp.ones((BATCH, SIZE))


def compiled(f, **options):
    fn = rlfx.compile(f, length=LENGTH, batch=BATCH, **options)
    params, obs = arguments()
    step = jax.jit(jax.value_and_grad(lambda p, o: fn(p, o, jax.random.key(0)), has_aux=True))
    return fn, step.lower(params, obs).compile()


def temp(executable):
    return executable.memory_analysis().temp_size_in_bytes


def assert_same(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5), one, other)


STACKED = LENGTH * BATCH * SIZE * 4


@pytest.mark.parametrize("share", spread([0.4, 1.1, 0.6], 1))
def test_a_budget_below_the_stacked_observations_is_met(share):
    _, plain = compiled(program, plan=rlfx.Plan())
    room = int(share * STACKED)
    fn, fitted = compiled(program, memory_budget=room)
    assert temp(fitted) <= room < temp(plain)
    assert_same(fitted(*arguments()), plain(*arguments()))
    if share < 1:
        assert fn.plan(*arguments()).form == "replay"


def test_what_xla_said_is_kept_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("RLFX_CACHE", str(tmp_path))

    def measured(f=n_step):
        fn = rlfx.compile(f, length=LENGTH, batch=BATCH, plan=rlfx.Plan("blocks", 4))
        return fn.explain(*arguments(), measure=True).measured_bytes

    def refuse(*_, **__):
        raise AssertionError("compiled")

    first = measured()
    assert first > STACKED / 8
    with monkeypatch.context() as compiling:
        compiling.setattr(jax.stages.Lowered, "compile", refuse)
        assert measured() == first
        with pytest.raises(AssertionError, match="compiled"):
            measured(program)  # another program
        (entry,) = tmp_path.rglob("*.json.gz")
        entry.write_bytes(b"not a file of ours")
        with pytest.raises(AssertionError, match="compiled"):
            measured()
    assert measured() == first


def test_environments_that_end_apart_are_acted_again():
    """Each block from its state, until the last of them has ended; the tiles share what is in memory."""

    def ending(params, carry, t):
        obs, n = carry
        value, moved = program(params, obs, t)
        return value, (moved, n + 1)

    params, obs = arguments()
    options = {"length": 10, "batch": 4, "until": lambda c: c[1] >= 8}
    arguments_ = params, (obs[:4], jnp.array([0, 3, 6, 7])), jax.random.key(0)

    def gradient(fn):
        loss = lambda p: fn(p, *arguments_[1:])[0]  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(params)

    expected = gradient(rlfx.lower(rlfx.trace(ending, *arguments_, **options)))
    reference = rlfx.reference(ending, **options)(*arguments_)[0]
    np.testing.assert_allclose(expected[0], reference, rtol=1e-5)
    for block, tile in ((1, None), (3, 2), (5, None), (10, 1)):
        fn = rlfx.compile(ending, **options, plan=rlfx.Plan("replay", block, tile))
        assert_same(gradient(fn), expected)


def test_a_generous_budget_changes_nothing():
    assert compiled(program, memory_budget=1 << 30)[0].plan(*arguments()) == compiled(program)[0].plan(*arguments())


def test_monte_carlo_and_n_step_choose_different_plans():
    """TimeRL Fig. 11: one has to wait for the end of the rollout, the other learns behind the actor and forgets."""
    room = STACKED // 2
    assert compiled(program, memory_budget=room)[0].plan(*arguments()).form == "replay"
    fn, fitted = compiled(n_step, memory_budget=room)
    assert fn.plan(*arguments()).form == "stream"
    assert temp(fitted) <= room


def planned_for(platform, f, room, monkeypatch, jaxlib="0.11.1"):
    """The plan that the planner would choose on a platform; nothing is compiled."""
    monkeypatch.setattr(budget, "JAXLIB", jaxlib)
    asked = 1 << 40  # some budget: with one nothing is drawn ahead of loops
    explanation = rlfx.compile(f, length=LENGTH, batch=BATCH, memory_budget=asked).explain(*arguments())
    evaluator, cpu = explanation.evaluator, explanation.evaluator.target
    other = dataclasses.replace(cpu, platform=platform, room=dataclasses.replace(cpu.room, host=platform != "cpu"))
    evaluator = dataclasses.replace(evaluator, target=other)
    return budget.search(evaluator, explanation.learner, explanation.plan, room), evaluator


def test_with_host_memory_of_its_own_monte_carlo_offloads(monkeypatch):
    """TimeRL Fig. 11 on a GPU: wait, offload, fetch; n-step learns behind the actor and moves nothing."""
    room = STACKED // 2
    plan, evaluator = planned_for("cuda", program, room, monkeypatch)
    assert (plan.form, plan.offload) == ("blocks", budget.OFFLOADED)
    assert evaluator.timeline(plan).peak_device <= room < STACKED <= evaluator.timeline(plan).peak_host
    assert "; what is stored is in host memory" in str(plan)
    assert rlfx.Plan.from_json(plan.to_json()) == plan
    assert planned_for("cuda", n_step, room, monkeypatch)[0].form == "stream"
    assert planned_for("cpu", program, room, monkeypatch)[0].form == "replay"  # where the host's memory is the same
    assert planned_for("cuda", program, room, monkeypatch, "0.10.2")[0].form == "replay"  # wrong gradients there
    fn = rlfx.compile(program, length=LENGTH, batch=BATCH, plan=plan)
    gradient = jax.jit(jax.grad(lambda p, o: fn(p, o, jax.random.key(0))[0]))
    cuda = gradient.trace(*arguments()).lower(lowering_platforms=("cuda",)).as_text()
    assert f"tensor<{BATCH}x{SIZE}xf32>" in next(line for line in cuda.splitlines() if "pinned_host" in line)


def test_a_budget_that_only_offload_could_meet():
    """What happens once cannot be acted again; on a backend without host memory of its own nothing else is left."""

    def simulated(params, obs, t):
        """The next observation comes from outside."""
        value, _ = program(params, obs, t)
        shape = jax.ShapeDtypeStruct(obs.shape, obs.dtype)
        return value, io_callback(lambda x: 0.9 * np.roll(x, 1, -1), shape, jax.lax.stop_gradient(obs))

    with pytest.raises(MemoryBudgetError) as error:
        compiled(simulated, memory_budget=STACKED // 2)
    assert "With the stored values in host memory" in str(error.value)
    assert "would do, but on cpu that is the same memory." in str(error.value)


def test_a_plan_offloads_in_blocks_only():
    with pytest.raises(ScheduleError, match="'stream' fetches nothing from the host: offload is for 'blocks'"):
        rlfx.Plan("stream", 4, offload=1)
    with pytest.raises(ScheduleError, match="offload must be a positive integer or None, got 0"):
        rlfx.Plan("blocks", 4, offload=0)


def test_a_budget_that_nothing_meets_names_the_smallest_that_would_do():
    with pytest.raises(MemoryBudgetError) as error:
        compiled(program, memory_budget=20_000)
    text = str(error.value)
    assert "program does not fit into memory_budget=20000 (19.53 KiB). The smallest plan needs" in text
    assert "What does not shrink" in text
    smallest = int(text.split("Give memory_budget=")[1].split(",")[0])
    _, fitted = compiled(program, memory_budget=smallest)
    assert temp(fitted) <= smallest


# -- axes that vmap adds ------------------------------------------------------------------------------------------------

SEEDS = 4


def gradient_of(fn):
    return lambda p, o, k: jax.value_and_grad(lambda p: fn(p, o, k), has_aux=True)(p)


def training(fn):
    """Two updates in a scan: what is inside is traced before it is mapped."""

    def train(p, o, k):
        def update(p, k):
            _, grads = gradient_of(fn)(p, o, k)
            return jax.tree.map(lambda x, g: x - 0.1 * g, p, grads), None

        return jax.lax.scan(update, p, jax.random.split(k, 2))[0]

    return train


WAYS = {
    "jit(vmap)": lambda fn: jax.vmap(gradient_of(fn), (None, None, 0)),
    "vmap(jit)": lambda fn: jax.vmap(jax.jit(gradient_of(fn)), (None, None, 0)),
    "vmap(scan)": lambda fn: jax.vmap(training(fn), (None, None, 0)),
}


@pytest.mark.parametrize("way", spread(list(WAYS), 1))
def test_a_budget_counts_the_axes_that_vmap_adds(way):
    """Every seed has its own observations, and all of them together fit."""
    room = 2 * STACKED + STACKED // 2
    params, obs = arguments()
    keys = jax.random.split(jax.random.key(0), SEEDS)
    fn = rlfx.compile(program, length=LENGTH, batch=BATCH, memory_budget=room)
    plain = rlfx.compile(program, length=LENGTH, batch=BATCH, plan=rlfx.Plan())
    fitted, unbounded = (jax.jit(WAYS[way](f)).lower(params, obs, keys).compile() for f in (fn, plain))
    assert temp(fitted) <= room < temp(unbounded)
    assert_same(fitted(params, obs, keys), unbounded(params, obs, keys))
    assert fn.plan(params, obs).form != "replay"  # one seed alone needs no such plan


def test_a_budget_that_no_plan_of_all_seeds_meets():
    fn = rlfx.compile(program, length=LENGTH, batch=BATCH, memory_budget=STACKED)
    keys = jax.random.split(jax.random.key(0), 8)
    with pytest.raises(
        MemoryBudgetError, match=r"program, mapped 8 times by jax\.vmap, does not fit into memory_budget"
    ):
        jax.make_jaxpr(WAYS["jit(vmap)"](fn))(*arguments(), keys)


def test_axes_with_names_and_second_derivatives_go_through_a_budget():
    def loss(w, x, t):
        return (w * x) ** 3, x + 1.0

    fn = rlfx.compile(loss, length=4, memory_budget=1 << 20)
    plain = rlfx.compile(loss, length=4)

    def shared(f):
        return jax.vmap(
            lambda w, x: jax.lax.pmean(jax.grad(lambda w: f(w, x)[0])(w), "seeds"), (None, 0), axis_name="seeds"
        )

    x = jnp.arange(3.0)
    np.testing.assert_allclose(shared(fn)(2.0, x), shared(plain)(2.0, x), rtol=1e-6)
    nested = [
        jax.vmap(jax.vmap(jax.grad(lambda w, x, f=f: f(w, x)[0]), (None, 0)), (0, None))(x, x) for f in (fn, plain)
    ]
    np.testing.assert_allclose(*nested, rtol=1e-6)


# -- bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, -5, "1GB", True])
def test_a_budget_is_a_number_of_bytes(wrong):
    with pytest.raises(DomainError, match="memory_budget must be a number of bytes, got"):
        rlfx.compile(program, length=3, memory_budget=wrong)


def test_temporary_bytes_fall_with_the_number_of_blocks():
    """Beyond what is stored, one over the number of blocks, by XLA's count and by the bound."""
    sizes = {n: temp(compiled(program, plan=rlfx.Plan("blocks", LENGTH // n))[1]) for n in (2, 4, 8)}
    estimated = {n: estimate_temp_bytes(gradient_jaxpr(rlfx.Plan("blocks", LENGTH // n))) for n in (2, 4, 8)}
    assert sizes[2] > sizes[4] > sizes[8] > STACKED
    assert estimated[2] > estimated[4] > estimated[8] > STACKED


def gradient_jaxpr(plan):
    fn = rlfx.compile(program, length=LENGTH, batch=BATCH, plan=plan)
    return jax.make_jaxpr(jax.value_and_grad(lambda p, o: fn(p, o, jax.random.key(0)), has_aux=True))(*arguments())


# -- host memory -----------------------------------------------------------------------------------------------------


def offloaded(f=program, **which):
    fn = rlfx.compile(rlfx.offload(f, **which), length=LENGTH, batch=BATCH)
    return fn, jax.value_and_grad(lambda p, o: fn(p, o, jax.random.key(0)), has_aux=True)


@pytest.mark.parametrize("which", [{"names": ["obs"]}, {"min_bytes": STACKED}])
def test_offloaded_values_are_written_to_and_fetched_from_the_host(which):
    fn, gradient = offloaded(**which)
    assert_same(jax.jit(gradient)(*arguments()), compiled(program)[1](*arguments()))
    assert f"f32[{LENGTH},{BATCH},{SIZE}] (host)" in str(fn.explain(*arguments(), verbose=True))
    cuda = jax.jit(gradient).trace(*arguments()).lower(lowering_platforms=("cuda",)).as_text()
    placements = [line for line in cuda.splitlines() if "annotate_device_placement" in line]
    to_host = [line for line in placements if "pinned_host" in line]
    to_device = [line for line in placements if '"device"' in line]
    assert len(to_host) == 1
    assert f"tensor<{BATCH}x{SIZE}xf32>" in to_host[0]  # one timestep as it is acted
    assert len(to_device) == 2  # the first block before the loop, the next one inside
    assert all(f"tensor<8x{BATCH}x{SIZE}xf32>" in line for line in to_device)


def scans_that_fetch(jaxpr):
    """The bodies of the scans that bring something to the device."""
    for e in jaxpr.eqns:
        for value in e.params.values():
            inner = getattr(value, "jaxpr", None)
            if inner is None:
                continue
            yield from scans_that_fetch(inner)
            moved = [v for b in inner.eqns if b.primitive.name == "device_put" for v in b.outvars]
            if e.primitive.name == "scan" and any(v.aval.memory_space != HOST for v in moved):
                yield inner


HOST = jax.memory.Space.Host


@pytest.mark.parametrize("length", [64, 61])  # with a shorter block at the end, too
def test_the_next_block_is_on_its_way_while_one_is_computed_with(length):
    """In the loop nothing reads what is fetched there but the next iteration: copies and products may overlap."""
    fn = rlfx.compile(program, length=length, batch=BATCH, plan=rlfx.Plan("blocks", 8, offload=1))
    gradient = jax.value_and_grad(lambda p, o: fn(p, o, jax.random.key(0)), has_aux=True)
    (body,) = scans_that_fetch(jax.make_jaxpr(gradient)(*arguments()).jaxpr)
    fetched = [v for e in body.eqns if e.primitive.name == "device_put" for v in e.outvars]
    assert fetched
    assert not [e for e in body.eqns for v in e.invars if any(v is f for f in fetched)]
    assert all(any(f is v for v in body.outvars) for f in fetched)
    plain = rlfx.compile(program, length=length, batch=BATCH, plan=rlfx.Plan())
    expected = jax.jit(jax.value_and_grad(lambda p, o: plain(p, o, jax.random.key(0)), has_aux=True))
    assert_same(jax.jit(gradient)(*arguments()), expected(*arguments()))


def test_a_program_on_the_host_under_vmap():
    fn = rlfx.compile(program, length=LENGTH, batch=BATCH, plan=rlfx.Plan("blocks", 8, offload=1))
    plain = rlfx.compile(program, length=LENGTH, batch=BATCH, plan=rlfx.Plan())
    params, obs = arguments()
    keys = jax.random.split(jax.random.key(0), 3)
    both = [
        jax.jit(jax.vmap(jax.grad(lambda p, k, f=f: f(p, obs, k)[0]), (None, 0)))(params, keys) for f in (fn, plain)
    ]
    assert_same(*both)


def test_nothing_goes_to_the_host_unasked():
    fn = rlfx.compile(program, length=LENGTH, batch=BATCH)
    step = jax.jit(jax.grad(lambda p, o: fn(p, o, jax.random.key(0))[0]))
    assert "pinned_host" not in step.trace(*arguments()).lower(lowering_platforms=("cuda",)).as_text()
    small, _ = offloaded(min_bytes=1 << 30)
    assert "(host)" not in str(small.explain(*arguments(), verbose=True))


def test_offload_of_a_program_is_refused_with_the_reason():
    traced = rlfx.trace(program, *arguments(), length=LENGTH, batch=BATCH)
    with pytest.raises(DomainError, match=r"No value of program is named 'image'; named values: \['obs'\]"):
        rlfx.offload(traced, names=["image"])
    with pytest.raises(DomainError, match="takes names= or min_bytes="):
        rlfx.offload(traced)
    unrolled = rlfx.trace(lambda p, c, t: (c, c), None, jnp.float32(0.0), length=3, loss=False)
    with pytest.raises(DomainError, match="stores nothing for a learner"):
        rlfx.offload(unrolled, min_bytes=1)


@pytest.mark.parametrize("found", [True, False])
def test_a_plan_may_need_all_of_a_budget(monkeypatch, found):
    """One that the search expects to fit, and the smallest where it expects none to."""
    monkeypatch.setattr(PlanEvaluator, "measured", lambda self, plan: STACKED)
    if not found:
        monkeypatch.setattr(budget, "search", lambda *_: None)
    assert compiled(program, memory_budget=STACKED)[0].plan(*arguments()) is not None
    with pytest.raises(MemoryBudgetError, match=f"Give memory_budget={STACKED}"):
        compiled(program, memory_budget=STACKED - 1)
