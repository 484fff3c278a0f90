"""Programs in programs, the examples: each is a loop of Python around the inner program, and its memory is what it says."""

import jax
import jax.numpy as jnp
import learned_rate
import maml
import networks
import numpy as np
import population
import pytest
import two_roles
import whole_run

import rlfx

KEY = jax.random.key(7)


def keys_of(length, names, batch=None):
    """The keys of each iteration, from a program that does nothing else."""

    def take(_, carry, i):
        return carry, tuple(i.key_for(name) if name else i.key for name in names)

    carry = None if batch is None else jnp.zeros(batch["p"])
    return rlfx.unroll(take, length=length, dim="i", batch=batch)(None, carry, KEY)[1]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_whole_run_is_a_python_loop(lag, monkeypatch, lenient):
    iterations, length, batch = 3, 8, 4
    monkeypatch.setattr(whole_run, "LOG_EVERY", 2)
    first = whole_run.init(jax.random.key(0), batch)
    train = jax.jit(whole_run.make_train(iterations=iterations, length=length, batch=batch, lag=lag))
    agent, logs = train(None, first, KEY)

    rollout, epochs = jax.jit(rlfx.unroll(whole_run.act, length=length, batch=batch)), jax.jit(whole_run.epochs)
    (params, opt_state, carry), policies, falls = first, [first.params] * lag, []
    for act_key, shuffle_key in zip(*keys_of(iterations, ("", "shuffle")), strict=True):
        policies.append(params)
        carry, (samples, (_, done)) = rollout(policies[-1 - lag], carry, act_key)
        falls.append(1000 * done.mean())
        params, opt_state = epochs((params, opt_state), samples, shuffle_key)

    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)  # noqa: E731
    jax.tree.map(close, agent, whole_run.Agent(params, opt_state, carry))
    jax.tree.map(close, logs["policy"], policies[iterations - 1])
    np.testing.assert_allclose(logs["falls"], [np.mean(falls[: i + 1]) for i in (0, 2)], rtol=1e-5)


def test_two_devices_are_one_to_the_last_bit(lenient):
    """The carry of the environments, too; the number of iterations is no multiple of anything."""
    iterations, length, batch = 3, 8, 4
    first = whole_run.init(jax.random.key(0), batch)
    one = jax.jit(whole_run.make_train(iterations=iterations, length=length, batch=batch, lag=1))
    wanted, _ = one(None, first, KEY)
    two = jax.jit(two_roles.make_train(two_roles.role_mesh(), iterations=iterations, length=length, batch=batch))
    got = two(first, KEY)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert float(jnp.abs(got.params["actor"][0][0] - first.params["actor"][0][0]).max()) > 0


def test_a_meta_gradient_is_that_of_the_unrolled_program():
    updates, rate = 3, jnp.float32(0.05)
    params, x = learned_rate.init()
    keys = list(keys_of(updates, ("",))[0])

    def by_hand(rate):
        adapted = params
        for key in keys:
            adapted = learned_rate.update(rate, adapted, x, key)
        return learned_rate.loss_fn(adapted, x, jax.random.fold_in(KEY, updates))[0]

    reached = learned_rate.make_reached(updates)
    got = jax.jit(jax.value_and_grad(lambda rate: reached(rate, KEY)))(rate)
    np.testing.assert_allclose(got, jax.jit(jax.value_and_grad(by_hand))(rate), rtol=1e-4)
    near = [float(jax.jit(reached)(rate + e, KEY)) for e in (-0.005, 0.005)]
    np.testing.assert_allclose(got[1], (near[1] - near[0]) / 0.01, rtol=5e-3)


def _walked(policy, goal):
    """The loss of `maml.walk`, timestep by timestep, without a program."""
    x, losses = maml.PLACES_AT, []
    for _ in range(maml.LENGTH):
        x = x + 0.1 * jnp.tanh(jax.vmap(lambda x: networks.mlp(policy, x))(x))
        losses.append(jnp.sum((x - goal[None]) ** 2, -1))
    return jnp.mean(jnp.stack(losses))


def test_maml_is_the_unrolled_program(lenient):
    """The gradient of what two updates reach, and two meta-steps for three goals."""

    def reached(policy, goal, updates=2):
        for _ in range(updates):
            policy = jax.tree.map(lambda w, g: w - maml.RATE * g, policy, jax.grad(_walked)(policy, goal))
        return _walked(policy, goal)

    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)  # noqa: E731
    first = maml.init(jax.random.key(0), hidden=4)
    end, logs = jax.jit(maml.make_train(iterations=2, goals=3, updates=2))(None, first, KEY)
    policy, opt_state = first.value
    by_hand = jax.jit(jax.value_and_grad(reached))
    for goals, before, after in zip(logs["goal"], logs["before"], logs["after"], strict=True):
        assert len(np.unique(goals)) == 6
        close(before, np.mean([_walked(policy, goal) for goal in goals]))
        values, grads = zip(*(by_hand(policy, goal) for goal in goals), strict=True)
        close(after, np.mean(values))
        grads = jax.tree.map(lambda *each: sum(each) / len(each), *grads)
        changes, opt_state = maml.adam.update(grads, opt_state, policy)
        policy = jax.tree.map(jnp.add, policy, changes)
    jax.tree.map(close, end.value[1][0].mu, opt_state[0].mu)  # what the gradients were
    jax.tree.map(close, end.value[0], policy)


def test_the_memory_of_a_meta_gradient():
    """Of 64 updates, by XLA."""
    gradient = jax.jit(jax.value_and_grad(learned_rate.make_reached()))
    found = gradient.lower(jnp.float32(0.05), KEY).compile().memory_analysis()
    assert found.temp_size_in_bytes < 1e6


def test_members_copy_the_better_half():
    """By a loop of Python over iterations and members."""
    iterations, members, batch = 4, 4, 3
    first = population.init(jax.random.key(0), members, batch)
    first = first._replace(rate=jnp.linspace(0.01, 0.05, members))
    end, logs = jax.jit(population.make_train(iterations=iterations, members=members, length=12, batch=batch))(
        None, first, KEY
    )

    loss_fn = rlfx.compile(population.actor_critic, length=12, batch=batch)
    gradient = jax.jit(jax.value_and_grad(lambda w, *args: loss_fn(w, *args), has_aux=True))
    keys, rate_keys = keys_of(iterations, ("", "rate"), batch={"p": members})
    all_ = [jax.tree.map(lambda leaf, p=p: leaf[p], first) for p in range(members)]
    for i in range(iterations):
        results = [gradient(me.params, me.state, keys[i, p]) for p, me in enumerate(all_)]
        falls = np.array([falls for (_, (_, falls)), _ in results])
        np.testing.assert_allclose(logs["falls"][i], falls, rtol=1e-5)
        learned = [
            jax.tree.map(lambda w, g, me=me: w - me.rate * g, me.params, g)
            for me, (_, g) in zip(all_, results, strict=True)
        ]
        parents = list(range(members))
        if i % population.MIGRATE_EVERY == 0:
            order = np.argsort(falls, kind="stable")
            for better, worse in zip(order[: members // 2], order[members // 2 :], strict=True):
                parents[worse] = int(better)
            assert logs["parent"][i].tolist() == parents
        following = []
        for p, parent in enumerate(parents):
            noise = jnp.exp(0.2 * jax.random.normal(rate_keys[i, p])) if parent != p else 1.0
            following.append(population.Member(learned[parent], all_[parent].rate * noise, results[p][0][1][0]))
        all_ = following
        np.testing.assert_allclose(logs["rate"][i], [me.rate for me in all_], rtol=1e-5)
    for p, me in enumerate(all_):
        jax.tree.map(lambda a, b, p=p: np.testing.assert_allclose(a[p], b, rtol=1e-4, atol=1e-5), end.params, me.params)


def test_the_scripts_run(capsys, lenient):
    learned_rate.main(["--updates", "2", "--steps", "1"])
    population.main(["--iterations", "1"])
    maml.main(["--iterations", "1", "--hidden", "4"])
    out = capsys.readouterr().out
    assert "after 2 updates" in out
    assert "of the best" in out
    assert "after 1 update" in out
