"""The critical chain: what a makespan waited for, against a plain walk and against what shortening tasks does."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlfx.place import baselines
from rlfx.place.critical import chain as critical_chain
from rlfx.place.search import Moves, anneal, initial
from rlfx.place.simulate import simulate


def scheduled(problem, assignment):
    device, order = jnp.asarray(assignment.device)[None], jnp.asarray(assignment.order)[None]
    return jax.tree.map(lambda x: x[0], simulate(problem, device, order))


def walk(problem, device, s):
    """Intervals from the end of the execution to its beginning, each beginning where the one after it waited."""
    start, finish, sent, arrived = (np.asarray(x) for x in (s.start, s.finish, s.sent, s.arrived))
    v = int(np.argmax(finish))
    on, spans = {v}, [(start[v], finish[v])]
    while spans[-1][0] > 0:
        now = spans[-1][0]
        copies = np.argwhere((arrived == now) & np.isfinite(sent))
        needed = [(u, d) for u, d in copies if (d == device[v] and problem.adjacency[u, v])]
        if needed:
            u, d = needed[0]
            while True:
                spans.append((sent[u, d], arrived[u, d]))
                on.add(int(u))
                if finish[u] == sent[u, d]:
                    break
                u = next(w for w in range(len(device)) if device[w] == device[u] and arrived[w, d] == sent[u, d])
            v = int(u)
        else:
            v = next(w for w in range(len(device)) if device[w] == device[v] and finish[w] == now)
        on.add(v)
        spans.append((start[v], finish[v]))
    return on, spans


@pytest.mark.parametrize("seed", range(6))
def test_the_chain_covers_the_whole_execution(chain, seed):
    assignment = baselines.random_assignment(chain, np.random.default_rng(seed))
    s = scheduled(chain, assignment)
    on, spans = walk(chain, assignment.device, s)
    assert sum(b - a for a, b in spans) == pytest.approx(float(s.makespan), rel=1e-5)
    found = critical_chain(chain, jnp.asarray(assignment.device), s)
    assert set(np.flatnonzero(found.on).tolist()) == on


def test_tasks_off_the_chain_do_not_matter_and_those_on_it_do(chain):
    rng = np.random.default_rng(0)
    factors = rng.uniform(0.5, 1.5, (chain.tasks, 1)).astype(np.float32)  # so that no two chains take equally long
    uneven = replace(chain, exec_time=chain.exec_time * factors)
    assignment = baselines.list_schedule(uneven, rng)
    s = scheduled(uneven, assignment)
    on = np.asarray(critical_chain(uneven, jnp.asarray(assignment.device), s).on)
    assert 0 < on.sum() < chain.tasks
    less = []
    for chosen in (on, ~on):
        changed = replace(uneven, exec_time=np.where(chosen[:, None], uneven.exec_time * 0.9999, uneven.exec_time))
        less.append(float(s.makespan) - float(scheduled(changed, assignment).makespan))
    assert less[0] > 1e-6
    assert abs(less[1]) < 0.01 * less[0]


def test_before_is_the_task_that_the_device_ran_last(chain):
    assignment = baselines.random_assignment(chain, np.random.default_rng(1))
    s = scheduled(chain, assignment)
    before = np.asarray(critical_chain(chain, jnp.asarray(assignment.device), s).before)
    start, finish = np.asarray(s.start), np.asarray(s.finish)
    for v, u in enumerate(before):
        if u != v:
            assert assignment.device[u] == assignment.device[v]
            assert finish[u] == start[v]
    assert np.all(before[start == 0] == np.flatnonzero(start == 0))


def test_guided_search_beats_an_unguided_one_at_equal_calls(chain):
    starts = [baselines.random_assignment(chain, np.random.default_rng(i)) for i in range(4)]
    costs = baselines.evaluate(chain, starts)
    state = initial(chain, starts, costs, 4)
    unguided = Moves(ahead=0.0, critical=0.0)
    guided = Moves(ahead=1.0, critical=0.5)
    ends = [float(jnp.median(anneal(chain, jax.random.key(0), state, 4 * 400, moves=m)[0].best_cost))
            for m in (unguided, guided)]  # fmt: skip
    assert ends[1] < ends[0] < costs.max()
