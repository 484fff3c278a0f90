"""`benchmarks/untuned`: all forms of a workload give the same results, and the harness measures what it says."""

import importlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
SETS = (
    "tuning", "held_out", "looked_at", "unseen", "sealed", "sealed_again", "sealed_third", "sealed_fourth", "sealed_fifth",
    "sealed_sixth", "sealed_seventh", "sealed_eighth", "sealed_ninth", "sealed_tenth", "sealed_eleventh", "sealed_twelfth",
    "sealed_thirteenth", "sealed_fourteenth", "sealed_fifteenth", "sealed_sixteenth", "sealed_seventeenth",
    "sealed_eighteenth", "sealed_nineteenth", "sealed_twentieth", "sealed_twenty_first", "sealed_twenty_second", "ordinary",
    "ordinary_more",
)  # fmt: skip
#: Without an environment, and so without random numbers, whose loops take long to compile.
CHEAP = ("vtrace.workload", "quantiles.workload")


@pytest.fixture(autouse=True)
def lenient():
    """optax and the benchmarks count on implicit promotion, as jax allows by default."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def module(name):
    """`benchmarks` is no package that is installed: it is found in the repository's root."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        return importlib.import_module(f"benchmarks.untuned.{name}")


def name_of(make):
    return f"{make.__module__.split('.')[-1]}.{make.__name__}"


def workloads():
    for make, sizes in (pair for name in SETS for pair in module(name).TINY.items()):
        marks = () if name_of(make) in CHEAP else (pytest.mark.slow,)
        yield pytest.param(make, sizes, id=name_of(make), marks=marks)


@pytest.mark.parametrize(("make", "sizes"), list(workloads()))
def test_all_forms_have_equal_results(make, sizes):
    workload = make(**sizes)
    assert {"rlfx", "plain"} <= set(workload.forms)
    assert len(workload.forms) >= (2 if make.__module__.split(".")[-2].startswith("ordinary") else 4)  # three by hand
    module("measure").check(workload, {name: jax.jit(fn) for name, fn in workload.forms.items()})


def test_every_set_can_be_chosen():
    assert tuple(name.replace("-", "_") for name in module("__main__").SETS) == SETS


def test_every_set_has_results():
    results = ROOT / "benchmarks" / "results"
    assert tuple(name for name in SETS if (results / f"untuned_{name}.json").exists()) == SETS


@pytest.mark.parametrize("name", SETS)
def test_every_workload_was_measured(name):
    """And in the file are the same forms and sizes as in the table."""
    kept = json.loads((ROOT / "benchmarks" / "results" / f"untuned_{name}.json").read_text())
    cases, tiny = module(name).CASES, module(name).TINY
    assert list(kept["workloads"]) == list(cases)
    assert {make for make, _ in cases.values()} == set(tiny)
    for workload, (_, sizes) in cases.items():
        row = kept["workloads"][workload]
        assert row["sizes"] == json.loads(json.dumps(sizes))
        assert row["best"] in set(row["forms"]) - {"rlfx"}
        assert all(len(times) >= 5 for times in row["cpu_s"].values())
    means = module("measure").summary(kept["workloads"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), kept["means"], means)


def sums(other):
    m = module("measure")
    return m.Workload(
        {"rlfx": jnp.sum, "plain": lambda x: x @ jnp.ones(3), "other": other}, (jnp.array([1.0, 2.0, 3.0]),)
    )


def test_a_form_with_another_result_is_refused():
    check = module("measure").check
    assert check(sums(lambda x: x.sum() * (1 + 1e-6)))["other"] == pytest.approx(1e-6, rel=0.2)
    with pytest.raises(AssertionError, match=r"other differs from plain by 1\.00e-03 > 1e-04"):
        check(sums(lambda x: x.sum() * 1.001))
    with pytest.raises(AssertionError, match="other differs from plain by inf"):
        check(sums(lambda x: x.sum() * jnp.nan))
    nothing = module("measure").Workload({"plain": jnp.zeros_like}, (jnp.ones(3),))
    with pytest.raises(AssertionError, match="nothing is compared"):
        check(nothing)


def test_measured_are_all_forms_and_their_ratios():
    m = module("measure")
    row = m.measure(sums(jnp.sum), rounds=5, seconds=0.1)
    assert set(row["forms"]) == set(row["cpu_s"]) == {"rlfx", "plain", "other"}
    assert row["best"] in ("plain", "other")
    assert all(r > 0 for times in row["cpu_s"].values() for r in times)
    means = m.summary({"sums": row})
    low, high = means["time_of_plain_interval"]
    assert low <= means["time_of_plain"] <= high
    assert means["time_of_plain"] == pytest.approx(np.median(m.ratios(row, "plain")))
    assert m.line("sums", row).startswith("| sums |")


def test_the_interval_holds_the_median_of_most_samples():
    """Of 200 samples of 15 rounds, the interval of 95% holds the true median of at least 88%."""
    m, rng = module("measure"), np.random.default_rng(0)
    held = 0
    for sample in rng.lognormal(0.0, 0.1, (200, 15)):
        low, high = m.interval(m.resampled_medians(sample))
        held += low <= 1.0 <= high
    assert held >= 176


def test_memory_is_that_of_the_form_named():
    m = module("measure")
    row = {
        "best": "fast",
        "forms": {n: {"temp_bytes": b} for n, b in {"rlfx": 6, "plain": 12, "fast": 3, "small": 0}.items()},
    }
    assert [m.memory_ratio(row, to) for to in ("plain", "best", "least")] == [0.5, 2.0, 6.0]


def test_rows_of_another_machine_are_not_kept(tmp_path):
    kept, path = module("__main__").kept, tmp_path / "rows.json"
    assert kept(path, {"machine": "a"}) == {}
    path.write_text(json.dumps({"machine": "a", "workloads": {"x": 1}}))
    assert kept(path, {"machine": "a"}) == {"x": 1}
    assert kept(path, {"machine": "b"}) == {}


def test_building_takes_both_forms_and_the_mean_of_their_ratios():
    """Each learner is written anew for each round, so that nothing is known of it."""
    building, made = module("building"), []

    def make(**sizes):
        made.append(sizes)
        scaled = lambda x, w: jnp.sum(jnp.tanh(x * w) ** 2)  # noqa: E731
        return module("measure").Workload({"rlfx": jax.grad(scaled), "plain": scaled}, (jnp.ones(3), jnp.ones(3)))

    row = building.built(make, {"n": 1}, 2)
    assert made == [{"n": 1}] * 4
    assert {form: set(stages) for form, stages in row.items()} == {f: {"trace_s", "compile_s"} for f in ("rlfx", "plain")}
    assert all(seconds > 0 for stages in row.values() for seconds in stages.values())
    rows = [{"rlfx": {"s": 2.0}, "plain": {"s": 1.0}}, {"rlfx": {"s": 8.0}, "plain": {"s": 1.0}}]
    assert np.isclose(building.mean(rows, lambda form: form["s"]), 4.0)


def test_work_counts_products_as_often_as_they_run():
    work, a, b = module("work"), jnp.ones((3, 4)), jnp.ones((4, 5))
    one = 2 * 3 * 4 * 5

    def chosen(x):  # of two branches the one with more
        return jax.lax.cond(x[0, 0] > 0, lambda: (x @ b).sum(), lambda: x[0] @ b[:, 0])

    image, kernel = jnp.ones((2, 3, 6, 6)), jnp.ones((7, 3, 2, 2))
    cases = {
        one: lambda x: x @ b,
        3 * one: lambda x: jax.vmap(lambda scale: (scale * x) @ b)(jnp.ones(3)),
        6 * one: lambda x: jax.lax.scan(lambda c, _: (c + (x @ b) @ b.T, None), x, None, length=3)[0],
        one + 8: lambda x: chosen(x) + x[0] @ b[:, 0],
        5 * one: lambda x: jax.jit(lambda x: x @ b)(x) + jax.lax.fori_loop(0, 3, lambda _, c: c + x @ b, x @ b * 0),
        2 * (2 * 7 * 5 * 5) * (3 * 2 * 2): lambda x: jax.lax.conv(x[0, 0] * image, kernel, (1, 1), "VALID"),
        0: lambda x: x + 1,
    }
    plain = lambda x: (x @ b, x.T @ x)[0]  # what nothing needs is not counted  # noqa: E731
    for expected, f in cases.items():
        workload = module("measure").Workload({"rlfx": f, "plain": plain, "other": lambda x: x * (x @ x.T).sum()}, (a,))
        found = work.counted(workload, "other")
        assert found == {"rlfx": expected, "plain": one, "best": 2 * 3 * 4 * 3}
    assert work.row_of({"rlfx": 0, "plain": 0, "best": 4}, "other")["of_best"] == 0.25
    assert work.row_of({"rlfx": 6, "plain": 4, "best": 0}, "other") == {
        "best": "other", "operations": {"rlfx": 6, "plain": 4, "best": 0}, "of_best": 6.0, "of_plain": 1.5
    }  # fmt: skip


def test_work_is_of_what_was_recorded(capsys):
    work = module("work")
    with pytest.raises(SystemExit, match="--only takes parts of the names"):
        work.main(["--only", "no such learner"])
    assert capsys.readouterr().out == ""


def test_again_takes_the_forms_that_were_fastest():
    again, m = module("again"), module("measure")
    forms = {"rlfx": jnp.sum, "plain": lambda x: x @ jnp.ones(3), "slow": lambda x: x[0] + x[1] + x[2], "fast": lambda x: x.sum()}
    there = {"rlfx": 3.0, "plain": 4.0, "slow": 3.5, "fast": 2.0}
    row = {"best": "fast", "forms": {name: {"cpu_ms": ms} for name, ms in there.items()}}
    args = again.parsed(["--forms", "1", "--rounds", "5", "--seconds", "0.1"])
    found = again.measured(lambda: m.Workload(forms, (jnp.arange(3.0),)), {}, row, args)
    assert set(found["ms"]) == {"rlfx", "plain", "fast"}
    assert found["of_best_there"] == 1.5
    assert found["best"] in ("plain", "fast")
    assert found["of_best"] > 0


def test_again_knows_all_that_is_recorded(capsys):
    again = module("again")
    cases = list(again.chosen(again.parsed([])))
    assert {workload for _, workload, _, _ in cases} <= set(again.recorded())
    assert list(again.chosen(again.parsed(["--every", "3"]))) == cases[::3]
    with pytest.raises(SystemExit):
        again.parsed(["--every", "0"])
    assert "argument --every: a whole number from 1 on is expected, got '0'." in capsys.readouterr().err
    (only,) = again.chosen(again.parsed(["--only", "R2D2"]))
    assert only[:2] == ("held-out", "R2D2 T=120 B=32")
    after = json.loads((ROOT / "benchmarks/results/untuned_sealed_eleventh_after.json").read_text())["workloads"]
    name, row = next(iter(after.items()))
    assert again.recorded()[name] == row
