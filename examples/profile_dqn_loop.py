"""Find out why a training loop is slow: the same little DQN update, driven by Python and by one jitted scan.

python examples/profile_dqn_loop.py
"""

import jax
import jax.numpy as jnp
import optax

from rlfx.profile import capture, operation

opt = optax.adam(1e-3)


def q(params, obs):
    return jnp.tanh(obs @ params["w1"]) @ params["w2"]


def act(params, key, obs):
    with operation("inference"):
        return jnp.where(jax.random.uniform(key) < 0.1, 0, q(params, obs).argmax(-1))


def simulate(key, obs, action):
    with operation("simulation"):
        push = jnp.where(action == 0, -0.1, 0.1)[:, None]
        return jnp.clip(obs + push + 0.01 * jax.random.normal(key, obs.shape), -1, 1), -jnp.abs(obs).sum(-1)


def learn(params, state, obs, action, reward, nxt):
    def loss(p):
        chosen = jnp.take_along_axis(q(p, obs), action[:, None], axis=1)[:, 0]
        return ((chosen - jax.lax.stop_gradient(reward + 0.99 * q(p, nxt).max(-1))) ** 2).mean()

    with operation("backpropagation"):
        updates, state = opt.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state


def step(carry, _, act=act, simulate=simulate, learn=learn):
    params, state, key, obs = carry
    key, k1, k2 = jax.random.split(key, 3)
    action = act(params, k1, obs)
    nxt, reward = simulate(k2, obs, action)
    params, state = learn(params, state, obs, action, reward, nxt)
    return (params, state, key, nxt), None


def start():
    params = {"w1": jnp.full((4, 32), 0.1), "w2": jnp.full((32, 2), 0.1)}
    return params, opt.init(params), jax.random.key(0), jnp.zeros((64, 4))


def main(steps=100):
    pieces = {"act": jax.jit(act), "simulate": jax.jit(simulate), "learn": jax.jit(learn)}
    scanned = jax.jit(lambda carry: jax.lax.scan(step, carry, None, length=steps)[0])

    def looped(carry):
        for _ in range(steps):
            carry, _ = step(carry, None, **pieces)
        return carry

    reports = {}
    for name, run in (("python loop", looped), ("scan", scanned)):
        carry = run(jax.block_until_ready(run(start())))  # compile first; the second call's argument types differ
        with capture(steps=64 * steps) as session:
            jax.block_until_ready(run(carry))
        reports[name] = session.report()
        print(f"== {name}\n{reports[name]}\n")
    print(reports["python loop"].compare(reports["scan"]))
    return reports


if __name__ == "__main__":
    main()
