"""Generated trees against NumPy loops in float64, with central differences for gradients.

A few here; five thousand with ``-m slow``. A tree that is wrong prints its program; ``python -m tests.oracle.sweep SEED
SEED+1 --shrink`` makes it small.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.oracle import driver, found, grow, loops, printed, shrink, sweep
from tests.oracle.features import FEATURES, ON
from tests.oracle.forms import FORMS
from tests.oracle.tree import Node, Tree, nodes, numbers

#: Few, since each is compiled twice; every kind of `grow.chosen` is among them.
SEEDS = (4, 13, 8)
SLOW = range(10_000, 15_000)
CHUNK = 50
#: Of the trees of a sweep. Refusals are legal, and a comparison can be too close: but then nothing was tested.
MOST_UNTESTED = 0.1


def check(seeds, *features: str, **ways) -> None:
    """``features``: those to have much of, also where they are off."""
    untested = 0
    for seed in seeds:
        tree = grow.chosen(seed, ON | set(features), set(features)) if features else grow.chosen(seed)
        verdict = driver.check(tree, reference=seed % 50 == 0, **(ways or sweep.one_way(seed)))
        listed = ",".join(features)
        options = f' --on "{listed}" --only "{listed}"' if features else ""
        text = f"python -m tests.oracle.sweep {seed} {seed + 1} --shrink{options}\n{printed.source(tree)}"
        assert not verdict.wrong, "\n".join([text, *verdict.wrong])
        untested += verdict.outcome != "right"
    assert untested <= max(1, MOST_UNTESTED * len(seeds)), f"{untested} of {len(seeds)} trees were not compared"


@pytest.mark.parametrize("seed", SEEDS)
def test_some_trees(seed: int):
    check([seed], plans=1)


@pytest.mark.parametrize("seed", [951200, 951206])
def test_some_trees_of_running_values(seed: int):
    check([seed], "running values", plans=1)


@pytest.mark.parametrize("seed", [953045, 953091])
def test_some_trees_of_values_behind_ends(seed: int):
    check([seed], "values behind ends", "beyond", plans=1)


@pytest.mark.slow
@pytest.mark.parametrize("first", SLOW[::CHUNK])
def test_five_thousand_trees(first: int):
    check(range(first, first + CHUNK))


@pytest.mark.parametrize("name", found.FOUND)
def test_what_was_wrong_once(name: str):
    verdict = driver.check(found.FOUND[name], reference="16-bit" in name)
    assert verdict.outcome == "right", [*verdict.wrong, *verdict.refused]


#: Seeds of the sweep whose programs crashed, by the cause.
CRASHED = {
    "a call without a body of jit's name, in a scan whose products are rewritten": 12664,
    "a start that is the same at every timestep and that the learner computes, learned from in blocks": 12741,
    "which environments have not ended, sent to the host": 12773,
    "a product of two slices beside each other": 11510,
}


@pytest.mark.parametrize("cause", [pytest.param(c, marks=[pytest.mark.slow] if "scan" in c else []) for c in CRASHED])
def test_what_crashed_once(cause: str):
    check([CRASHED[cause]])


# -- the oracle itself ------------------------------------------------------------------------------------------------


def test_the_numpy_side_imports_nothing_of_ours():
    """import-linter sees what is imported as a package; this reads the files themselves."""
    alone = {
        "tree",
        "form",
        "forms",
        "forms_of_values",
        "forms_of_slices",
        "features",
        "grow",
        "shrink",
        "found",
        "loops",
    }
    alone |= {"written_loops", "written_models"}
    for name in sorted(alone):
        for statement in ast.walk(ast.parse((Path(__file__).parent / f"{name}.py").read_text())):
            modules: set[str] = set()
            if isinstance(statement, ast.Import):
                modules = {a.name for a in statement.names}
            elif isinstance(statement, ast.ImportFrom):
                inside = statement.module == "tests.oracle"
                modules = {f"tests.oracle.{a.name}" for a in statement.names} if inside else {str(statement.module)}
            ours = {m.removeprefix("tests.oracle.") for m in modules if m.startswith("tests")}
            assert ours <= alone, f"{name} imports {ours}"
            others = {m.split(".")[0] for m in modules if not m.startswith("tests")}
            assert others <= {"numpy", "__future__"} | sys.stdlib_module_names, f"{name} imports {others}"


def test_the_same_seed_is_the_same_tree():
    assert grow.chosen(5) == grow.chosen(5)
    assert len({grow.chosen(seed) for seed in range(40)}) == 40


def test_every_form_is_written():
    """Each form that is on appears in the first trees of a sweep, and each of the others once it is switched on."""
    for on in (ON, frozenset(FEATURES)):
        written = {n.form for seed in range(1600) for n in nodes(grow.chosen(seed, on))}
        expected = {f.name for f in FORMS.values() if {f.feature, f.until} - {""} <= on}
        assert expected <= written


def test_a_wrong_value_and_a_wrong_gradient_are_found(monkeypatch):
    """The comparison itself: a program that is off by 1%, in value or in derivative, does not pass."""
    tree = Tree((Node("tanh", (Node("h"),)),), found.IDLE, length=2, batch=None)
    assert not driver.check(tree, plans=0).wrong
    right = printed.source(tree)
    for wrong, what in (
        (right.replace("1.3 *", "1.32 *"), "root 0"),
        (right.replace("jnp.tanh(1.3 * v0)", "(lambda x: x + 0.02 * (v0 - jax.lax.stop_gradient(v0)))(jnp.tanh(1.3 * v0))"),
         "the derivative along carry['h']"),
    ):  # fmt: skip
        monkeypatch.setattr(printed, "source", lambda tree, wrong=wrong: wrong)
        assert any(what in w for w in driver.check(tree, plans=0).wrong), wrong


def test_what_only_a_history_reads_is_carried():
    tree = grow.chosen(10894)
    assert tree.history
    assert any(n.form == "m" for n in nodes(Tree((), (), tree.history)))
    assert not any(n.form == "m" for n in nodes(Tree(tree.roots, ())))
    assert "m" in dict(tree.carried)


def test_close_comparisons_are_skipped():
    """Where rounding could decide, nothing is compared: a kink 1e-9 away."""
    tree = Tree((Node("relu", (Node("a"),)),), found.IDLE, length=1, batch=None)
    params, carry = numbers(tree)
    for a, close in ((-0.05 + 1e-9, True), (0.4, False)):
        tape = loops.Tape({})
        loops.run(tree, {**params, "a": a}, carry, 0, tape)
        assert (tape.closest < loops.MARGIN) == close


def test_ties_by_chance_are_skipped():
    """Two values that are equal, and move apart; the same value twice stays."""
    for form, other, close in (("larger", Node("third"), True), ("max_b", None, False)):
        tree = Tree((Node(form, (Node("a"), other) if other else (Node("a"),)),), found.IDLE, length=1, batch=2)
        params, carry = numbers(tree)
        params["w"][1] = params["a"]
        tape = loops.Tape({})
        loops.run(tree, params, carry, 0, tape)
        assert tape.closest == np.inf
        loops.slopes(tree, params, carry, 0, tape, [{("params", "a"): np.array(1.0)}])
        assert (tape.closest < loops.MARGIN) == close
    tree = Tree((Node("max_tb", (Node("xb"),)),), found.IDLE, length=2, batch=2)  # each value is there twice
    params, carry = numbers(tree)
    tape = loops.Tape({})
    loops.run(tree, params | {"bs": np.array([0.5, 0.5 + 1e-6])}, carry, 0, tape)
    assert 0 < tape.closest < loops.MARGIN


def test_numbers_by_hand():
    """The NumPy side against arithmetic: a discounted sum of what is ahead, its derivative, and an end."""
    tree = Tree((Node("discounted", (Node("slice", (Node("h"),), ("t:",)),)),), found.IDLE, length=3, batch=1, until=2)
    params, carry = numbers(tree)
    carry |= {"h": np.array([0.5]), "n": np.array([0])}
    tape = loops.Tape({})
    result = loops.run(tree, params, carry, 0, tape)
    np.testing.assert_allclose(result.aux[0][:, 0], [0.5 * 1.7, 0.5, 0.0])
    assert result.ends == [2]
    slopes = loops.slopes(tree, params, carry, 0, tape, [{("carry", "h"): np.array([1.0])}])
    np.testing.assert_allclose(slopes[False][(("carry", "h"),)], (1.7 + 1) / 2)


def test_shrinking_keeps_the_failure_and_little_else():
    big = next(t for t in map(grow.chosen, range(300)) if any(n.form == "discounted" for n in nodes(t)))
    small = shrink.shrink(big, lambda t: any(n.form == "discounted" for r in t.roots for n in nodes(Tree((r,), ()))))
    _, of, failing = [n.form for r in small.roots for n in nodes(Tree((r,), ()))]
    assert (FORMS[of].out, failing) == ("s", "discounted")  # of a slice, whichever the tree had
    assert (small.length, small.batch, small.until) == (1, None, None)
