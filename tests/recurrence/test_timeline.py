"""Memory over time: Monte-Carlo waits, offloads and fetches; n-step learns behind the actor and forgets (TimeRL Fig. 11)."""

import jax
import jax.numpy as jnp
import pytest

import rlfx
from rlfx.recurrence.analysis.cost import show_bytes
from rlfx.recurrence.memory.estimate import estimate_temp_bytes
from rlfx.recurrence.memory.plot import draw_timeline, phases
from rlfx.recurrence.memory.timeline import Segment, Timeline, timeline
from tests.recurrence.test_budget import BATCH, LENGTH, STACKED, arguments, n_step, program

pytestmark = pytest.mark.optimised

PLANS = {
    "at once": (program, rlfx.Plan()),
    "blocks": (program, rlfx.Plan("blocks", 8)),
    "offload": (program, rlfx.Plan("blocks", 8, offload=STACKED)),
    "replay": (program, rlfx.Plan("replay", 16, 4)),
    "stream": (n_step, rlfx.Plan("stream", 4)),
}


def explained(name, **options):
    f, plan = PLANS[name]
    return rlfx.compile(f, length=LENGTH, batch=BATCH, plan=plan).explain(*arguments(), **options)


def at(found, share, what):
    """What is held after a share of the time."""
    return next(getattr(s, what) for s, end in zip(found.segments, found.ends, strict=True) if end >= share)


@pytest.mark.parametrize("name", PLANS)
def test_the_peak_is_the_estimate(name):
    explanation = explained(name)
    found = explanation.timeline
    assert (
        found.peak == estimate_temp_bytes(explanation.evaluator.jaxpr(explanation.plan)) == explanation.predicted_bytes
    )
    assert found.ends[-1] == pytest.approx(1.0)
    assert all(0 <= s.filled_host <= s.host for s in found.segments)
    assert all(0 <= s.filled <= s.device for s in found.segments)


def test_monte_carlo_waits_and_keeps_observations_on_the_host():
    """They fill the host's memory while it acts, and the device holds some blocks of them while it learns."""
    found = explained("offload").timeline
    waits = found.learning_begins
    assert 0.2 < waits < 0.8
    acted = next(end for s, end in zip(found.segments, found.ends, strict=True) if s.filled_host >= STACKED)
    assert acted <= waits
    acts = max(end for s, end in zip(found.segments, found.ends, strict=True) if end < acted and s.filled_host == 0)
    assert acts < 0.05
    for share in (0.25, 0.5, 0.75):
        written = at(found, acts + share * (acted - acts), "filled_host")
        assert written == pytest.approx(share * STACKED, abs=1.1 * STACKED / LENGTH)
    assert found.peak_host >= STACKED
    assert found.peak_device < STACKED / 2
    assert not any(s.learning for s, end in zip(found.segments, found.ends, strict=True) if end < 0.9 * waits)
    on_device = explained("blocks").timeline
    assert on_device.peak_host == 0
    assert on_device.peak_device > STACKED


def test_n_step_learns_behind_the_actor_and_forgets():
    found = explained("stream").timeline
    assert found.learning_begins < 0.15
    assert found.peak < STACKED / 2
    assert found.peak_host == 0
    learned = [s.work if s.learning else 0.0 for s in found.segments]
    ends = found.ends
    half = sum(w for w, end in zip(learned, ends, strict=True) if end <= 0.5)
    assert half / sum(learned) == pytest.approx(0.5, abs=0.1)  # it learns at the pace at which it acts
    early = max(s.filled for s, end in zip(found.segments, ends, strict=True) if 0.1 < end < 0.3)
    late = max(s.filled for s, end in zip(found.segments, ends, strict=True) if 0.7 < end < 0.9)
    assert early == late  # and does not grow
    assert len(phases(found)) > LENGTH / 4


def test_replay_acts_every_block_again():
    found = explained("replay").timeline
    assert found.peak < STACKED / 2
    spans = phases(found)
    assert sum(learning for *_, learning in spans) >= LENGTH // 16
    assert [learning for *_, learning in spans][:3] == [False, True, False]


def test_loops_are_drawn_iteration_by_iteration():
    def grow(x):
        return jax.lax.scan(lambda c, _: (c + 1.0, jnp.tanh(c)), x, None, length=4)[1].max()

    found = timeline(jax.make_jaxpr(grow)(jnp.ones(1024)))
    assert [s.filled >> 12 for s in found.segments if s.device == found.peak_device][:4] == [3, 4, 5, 6]
    long = timeline(
        jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (c * 2.0, c), x, None, length=1000)[1])(jnp.ones(9))
    )
    assert 64 <= len(long.segments) < 200


def test_phases_join_segments():
    parts = [Segment(1.0, 5, 0, 5, 0, False), Segment(1.0, 6, 1, 4, 1, False), Segment(2.0, 1, 0, 1, 0, True)]
    found = Timeline(tuple(parts))
    assert phases(found) == [(0.0, 0.5, False), (0.5, 1.0, True)]
    assert (found.peak, found.peak_device, found.peak_host) == (7, 6, 1)


# -- for people -------------------------------------------------------------------------------------------------------


def test_explain_says_what_is_predicted_and_what_xla_measured():
    unmeasured = explained("blocks")
    assert unmeasured.measured_bytes is None
    assert f"temporary memory: predicted {show_bytes(unmeasured.predicted_bytes)}\n" in str(unmeasured)
    measured = explained("blocks", measure=True)
    f, plan = PLANS["blocks"]
    fn = rlfx.compile(f, length=LENGTH, batch=BATCH, plan=plan)
    gradient = jax.jit(jax.value_and_grad(lambda p, o, k: fn(p, o, k), has_aux=True))
    exact = gradient.lower(*arguments(), jax.random.key(0)).compile().memory_analysis().temp_size_in_bytes
    assert measured.measured_bytes == pytest.approx(exact, rel=0.01)
    assert abs(measured.predicted_bytes / exact - 1) < 0.2
    assert f"measured by XLA {measured.measured_bytes / 2**20:.4g} MiB" in str(measured)
    assert "in host memory)" in str(explained("offload"))


def test_a_budget_is_met_and_shown():
    budget = STACKED // 2
    explanation = rlfx.compile(program, length=LENGTH, batch=BATCH, memory_budget=budget).explain(*arguments())
    assert explanation.measured_bytes <= budget
    assert ", budget 512 KiB\n" in str(explanation)


def test_the_figure_shows_both_memories():
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("Agg")
    figure = explained("offload", measure=True).plot()
    *_, axis = figure.axes
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert labels == ["device, in use", "device, buffers", "host, in use", "host, buffers", "measured by XLA"]
    assert axis.get_ylim()[1] > STACKED / 2**20
    plt.close(figure)
    _, alone = plt.subplots()
    draw_timeline(alone, explained("stream"))
    assert len(alone.get_legend().get_texts()) == 2
    plt.close("all")


def test_an_unrolled_program_has_a_timeline_too():
    fn = rlfx.unroll(lambda p, c, t: (c * p, c), length=9, batch=4)
    explanation = fn.explain(2.0, jnp.ones(4))
    assert explanation.predicted_bytes == explanation.timeline.peak
