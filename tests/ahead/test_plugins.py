"""With the plugins: real compilations for machines that are not here (make test-aot)."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import rlfx
from rlfx.errors import TargetError
from rlfx.transforms.fuse_steps import fuse_scan
from tests.ahead import programs
from tests.ahead.conftest import installed
from tests.sampling import slow
from tests.transforms.test_fuse_tiles import acting, beginning, networks

pytestmark = pytest.mark.aot

S = jax.ShapeDtypeStruct
KEY = jax.eval_shape(lambda: jax.random.key(0))
PLUGIN = {"h200": "cuda", "h100": "cuda", "a100": "cuda", "t4": "cuda", "v5e": "tpu", "v6e": "tpu"}


def there(name: str) -> rlfx._target.Target:
    installed(PLUGIN[name.partition(":")[0]])
    return rlfx.target(name)


def loss(w, x, t):
    y = jnp.tanh(x @ w)
    reward = rlfx.series(y.sum())
    gain = jax.lax.stop_gradient(rlfx.discounted_sum(reward[t:], 0.9))
    new = jax.lax.stop_gradient(y) + 0.1 * jax.random.normal(t.key, x.shape)
    return gain * jnp.sum((jax.lax.stop_gradient(y) @ w) ** 2), jax.lax.stop_gradient(new)


T, B, H = 100, 256, 64
ARGUMENTS = S((H, H), jnp.float32), S((B, H), jnp.float32), KEY


def gradient(fn):
    return lambda w, x, key: jax.value_and_grad(lambda w: fn(w, x, key), has_aux=True)(w)


@pytest.mark.parametrize("name", [*PLUGIN])
def test_the_loops_of_a_program(name):
    found = there(name).compile(programs.loops, *programs.LOOPS)
    assert [loop.trips for loop in found.loops] == [programs.STEPS] * 2
    assert (found.argument_bytes >= sum(s.size * 4 for s in programs.LOOPS)) == (found.host_temp_bytes == 0)
    assert bool(found.kernels) == (PLUGIN[name] == "cuda")
    assert (found.flops is not None) == (PLUGIN[name] == "tpu")


@pytest.mark.parametrize("name", ["h200", "v5e"])
def test_a_learner_is_traced_for_the_machine(name):
    """As for the target that is named, though nothing was said to ``rlfx.compile``: no random numbers unrolled as for a CPU."""
    target = there(name)
    named, unnamed = (
        target.compile(gradient(rlfx.compile(loss, length=T, batch=B, target=t)), *ARGUMENTS) for t in (target, None)
    )
    assert named.launches == unnamed.launches
    assert named.temp_bytes == unnamed.temp_bytes
    assert {loop.trips for loop in named.loops} == {T // target.rewrites.unroll}


@pytest.mark.parametrize("name", ["a100", slow("h200")])
def test_a_budget_holds_by_the_number_of_that_compiler(name):
    target = there(name)
    free = rlfx.compile(loss, length=T, batch=B, target=target).explain(*ARGUMENTS, measure=True)
    budget = free.measured_bytes // 4
    fn = rlfx.compile(loss, length=T, batch=B, target=target, memory_budget=budget)
    shown = fn.explain(*ARGUMENTS)
    assert shown.measured_bytes <= budget
    assert target.compile(gradient(fn), *ARGUMENTS).temp_bytes <= budget


@pytest.mark.parametrize("name", ["h200:8", "h200:2x8", "v5e:4x4"])
def test_devices_meet_once_for_a_gradient(name):
    target = there(name)
    mesh = target.mesh("b")
    fn = gradient(rlfx.compile(loss, length=T, batch=B, mesh=mesh, target=target))
    w, x, key = ARGUMENTS
    split = S(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec("b")))
    found = target.compile(fn, w, split, key)
    assert {c.kind for c in found.collectives} == {"all-reduce"}
    assert not any(c.in_loop for c in found.collectives)
    parts = H * H * 4, 4, 4  # the gradient, the loss, and the number of points that its mean is over
    assert sum(c.bytes * c.count for c in found.collectives) == sum(parts)
    assert found.devices == target.devices


def test_memory_falls_with_the_devices():
    sizes = []
    for name in ("h200", "h200:8"):
        target = there(name)
        mesh = target.mesh("b")
        fn = gradient(rlfx.compile(loss, length=T, batch=B, mesh=mesh if target.devices > 1 else None, target=target))
        sharding = NamedSharding(mesh, PartitionSpec("b")) if target.devices > 1 else None
        sizes.append(target.compile(fn, ARGUMENTS[0], S((B, H), jnp.float32, sharding=sharding), KEY).temp_bytes)
    assert sizes[1] < 0.2 * sizes[0]


@pytest.mark.parametrize(("name", "kernel"), [("h200", True), ("a100", True), ("t4", False)])
def test_fused_steps_are_one_kernel_where_triton_is(name, kernel):
    env = rlfx.envs.make("CartPole-v1")
    states = jax.eval_shape(lambda k: jax.vmap(env.reset)(jax.random.split(k, 4096)), KEY)
    found = there(name).compile(rlfx.fuse_steps(env, 1000, policy="random"), KEY, states)
    assert (found.launches < 10) == kernel
    assert [loop.trips for loop in found.loops] == ([] if kernel else [1000])
    assert any(k.name == "rlfx_fused_steps" for k in found.kernels) == kernel
    assert found.spill_bytes == 0


@pytest.mark.parametrize("name", ["a100", slow("h200")])
def test_acting_with_its_networks_is_one_kernel(name):
    """Actor and critic of two layers of 64, 1,024 environments; weights are in shared memory for all timesteps."""
    p, carry = jax.eval_shape(lambda: (networks(3, 64, 64), beginning(1024, 3)))
    found = there(name).compile(fuse_scan(acting, 128, backend="triton"), p, carry)
    (kernel,) = (k for k in found.kernels if k.name == "rlfx_acting")
    assert (found.loops, kernel.spill_bytes) == ((), 0)
    assert found.launches < 10
    assert 2 * 64 * 64 * 4 < kernel.shared_bytes < 64 * 1024


@pytest.mark.parametrize("name", ["h200", slow("a100")])
def test_acting_and_advantages_take_fifteen_launches(name, script):
    """All of a rollout of the demo with 1,024 environments: the kernel, the critic for all timesteps, advantages as a scan."""
    demo = script("ppo_cartpole")
    rollout = rlfx.unroll(demo.act, length=demo.LENGTH, batch=1024, transform=rlfx.fuse_steps)
    params, _, carry = jax.eval_shape(lambda key: demo.init_agent(key, demo.make_optimizer(1), 1024), KEY)
    found = there(name).compile(jax.jit(rollout, donate_argnums=1), params, carry, KEY)
    assert (found.loops, found.spill_bytes) == ((), 0)
    assert found.launches <= 15


@pytest.mark.parametrize("name", ["a100", slow("h200")])
def test_a_wide_state_that_is_turned_drawn_and_stored(name):
    """48 numbers: XLA once moved the transposition of what is stored through its random numbers, along each of 2^20 paths."""

    def act(w, x, t):
        y = jnp.tanh(x @ w)
        new = 0.9 * x + 0.1 * jnp.roll(x, 1) + 0.1 * jax.random.normal(t.key, x.shape) + y[0]
        return new, (jnp.mean(new**2), x)

    rollout = rlfx.unroll(act, length=50, batch=512, transform=rlfx.fuse_steps)
    found = there(name).compile(rollout, S((48, 64), jnp.float32), S((512, 48), jnp.float32), KEY)
    (kernel,) = (k for k in found.kernels if k.name == "rlfx_acting")
    assert (found.loops, kernel.spill_bytes) == ((), 0)
    assert found.launches < 10


@pytest.mark.parametrize("name", ["h200", slow("a100")])
def test_an_optimiser_takes_few_launches(name, script):
    """A minibatch step of the demo, with 12 arrays of weights; it was 57 kernels, and 42 until gradients were summed at once."""
    launches = script("launches")
    fn, arguments = launches.full(64)[launches.KERNEL]
    (outer,) = there(name).compile(fn, *arguments).loops
    (inner,) = outer.loops
    assert (outer.trips, inner.trips) == (4, 4)
    assert inner.kernels <= 40


@pytest.mark.slow
def test_an_epoch_takes_a_tenth_of_the_launches_by_hand(script):
    launches = script("launches")
    fn, arguments = launches.one_epoch()[launches.KERNEL]
    assert there("h200").compile(fn, *arguments).launches <= 580


@pytest.mark.parametrize("name", ["v5e", "v6e"])
def test_fused_steps_are_one_kernel_of_a_tpu(name):
    env = rlfx.envs.make("CartPole-v1")
    states = jax.eval_shape(lambda k: jax.vmap(env.reset)(jax.random.split(k, 4096)), KEY)
    found = there(name).compile(rlfx.fuse_steps(env, 1000, policy="random", backend="tpu"), KEY, states)
    assert found.loops == ()
    assert "tpu_custom_call" in found.hlo


def test_what_the_compiler_refuses_is_said_in_its_words():
    env = rlfx.envs.make("CartPole-v1")
    states = jax.eval_shape(lambda k: jax.vmap(env.reset)(jax.random.split(k, 256)), KEY)
    with pytest.raises(TargetError, match=r"JaxRuntimeError: .*Triton support is only enabled for Ampere GPUs"):
        there("t4").compile(rlfx.fuse_steps(env, 10, policy="random", backend="triton"), KEY, states)


@pytest.mark.parametrize("name", ["a100", "v5e"])
def test_rows_that_go_to_the_host_and_back(name):
    found = there(name).compile(programs.hosted, *programs.HOSTED)
    assert {t.kind: (t.count, t.bytes) for t in found.host_transfers} == {
        "to host": (programs.STEPS, 4096 * 4),
        "to device": (programs.STEPS, 4096 * 4),
    }
