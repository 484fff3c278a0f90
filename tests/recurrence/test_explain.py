"""What ``explain`` prints first: the user's names, why there are loops, what is kept, what to change."""

import re

import jax
import jax.numpy as jnp
import pytest

import rlfx
from rlfx.errors import ProgramError

W, CARRY = jnp.float32(0.5), {"x": jnp.ones(3), "clock": jnp.zeros(3)}


def line_of(text):
    with open(__file__) as source:
        return f"test_explain.py:{next(n for n, line in enumerate(source, 1) if text in line)}"


def loss(w, carry, t):
    noise = jax.random.normal(t.key)
    obs = jnp.sin(carry["x"]) + noise
    reward = rlfx.series(jnp.cos(obs))
    returns = rlfx.discounted_sum(reward[t:], 0.9)
    following = {"x": jax.lax.stop_gradient(carry["x"] + noise * obs), "clock": carry["clock"] + 1.0}
    return jnp.tanh(w * obs) * jax.lax.stop_gradient(returns), following


LOSS = rlfx.compile(loss, length=6, batch=3)
SHOWN = LOSS.explain(W, CARRY, jax.random.key(0))


def test_the_short_form_has_the_names_of_the_user():
    text = str(SHOWN)
    assert text.splitlines()[0] == "loss: T=6, B=3, the values and the gradient"
    assert re.search(r"step by step +\S.*obs", text)
    assert re.search(r"a loop: .*carry\['x'\].* of t comes from t - 1", text)
    assert re.search(r"step by step, backwards +.*returns", text)
    assert f"a loop: it needs returns[t + 1] ({line_of('returns = rlfx')})" in text
    kept = text[text.index("kept from acting for learning") :]
    assert re.search(rf"f32\[6,3\] +obs +{line_of('obs = jnp')}", kept)
    assert re.search(rf"f32\[6,3\] +jax\.lax\.stop_gradient\(returns\) +{line_of('return jnp.tanh')}", kept)
    assert "memory_budget=" in text
    assert str(LOSS.explain(W, CARRY, jax.random.key(0), verbose=True)).count("keeps:") > 0


def test_what_is_kept_adds_up():
    sizes = re.findall(r"^  (\d+) B ", str(SHOWN), re.MULTILINE)
    assert sum(map(int, sizes)) == SHOWN.stored_bytes


def test_stages_have_the_numbers_of_the_profiler():
    scopes = jax.jit(LOSS).lower(W, CARRY, jax.random.key(0)).as_text(debug_info=True)
    run = {(int(n), kind) for n, kind in re.findall(r"rlfx\.stage/(\d+) (all t|forward scan|backward scan)", scopes)}
    kinds = {"step by step": "forward scan", "step by step, backwards": "backward scan"}
    acting = str(SHOWN).split(" learning")[0]
    rows = re.findall(
        r"^  (\d+) +(once|all timesteps at once|step by step(?:, backwards)?)(?:  |$)", acting, re.MULTILINE
    )
    assert len(rows) >= 3
    assert {(int(n), kinds.get(how, "all t")) for n, how in rows} <= run


def test_an_unrolled_program_has_no_learner():
    act = rlfx.unroll(lambda w, x, t: (jnp.tanh(w * x), x), length=4)
    text = str(act.explain(W, jnp.float32(1.0)))
    assert "nothing is differentiated" in text
    assert "learning" not in text
    assert "gradient flows" not in text
    asked = str(act.explain(W, jnp.float32(1.0), wrt=True))
    assert "learning" in asked
    assert "the gradient flows through time in: carry" in asked


def test_an_associative_scan_is_called_so():
    assert "associative scan" not in str(SHOWN)
    there = LOSS.explain(W, CARRY, jax.random.key(0), target="a100")
    assert "associative scan" in str(there)
    assert any(stage.kind == "backward associative scan" for stage in there.stages)


def test_in_a_notebook_it_is_a_table():
    page = SHOWN._repr_html_()
    assert page.count("<table>") == page.count("</table>") == 3
    assert "carry[&#x27;x&#x27;]" in page
    assert "returns" in page


def test_values_on_the_way_to_a_name_are_said_to_be_inside():
    def f(w, x, t):
        y = jax.nn.log_softmax(w * jnp.stack([x, x + 1.0]))
        return y[0], x

    shown = rlfx.compile(f, length=3)
    program = shown.trace(W, jnp.float32(1.0))
    from rlfx.recurrence.ir.named import Named

    named = Named(program)
    found = [named(v) for e in program.equations if "test_explain" in e.where for v in e.outputs]
    assert "y" in found
    assert "inside y" in found
    assert [named(v) for v in (*program.params, *program.carry)] == ["params", "carry"]


def test_verbose_is_a_bool():
    with pytest.raises(ProgramError, match="verbose"):
        LOSS.explain(W, CARRY, jax.random.key(0), verbose=1.5)


def test_scopes_call_an_associative_scan_so():
    there = rlfx.compile(loss, length=6, batch=3, target="a100")
    text = jax.jit(there).lower(W, CARRY, jax.random.key(0)).as_text(debug_info=True)
    assert re.search(r"rlfx\.stage/\d+ backward associative scan", text)


def test_what_streams_is_not_said_to_be_kept():
    streamed = rlfx.compile(lambda w, c, t: (w * c, 0.9 * c), length=6, batch=3, plan=rlfx.Plan("stream", 2))
    text = str(streamed.explain(jnp.float32(1.0), jnp.ones(3)))
    assert re.search(r"given from acting to learning: \S+ \w+ in all, of which 2 timesteps are there at a time", text)
    assert "kept from acting" not in text
