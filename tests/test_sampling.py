"""What runs by default meets every row."""

from tests.sampling import met, spread


def by_default(cases):
    return [case for case in cases if not getattr(case, "marks", ())]


def test_a_spread_has_as_many_as_asked_for():
    assert by_default(spread(range(60), 20)) == list(range(0, 60, 3))
    assert by_default(spread(range(7), 3)) == [0, 2, 4]
    assert len(spread(range(60), 20)) == 60


def test_every_value_of_every_axis_is_met():
    axes = ("abcde", [1, 2, 3], [True, False])
    cases = met(*axes)
    assert len(cases) == 30
    default = by_default(cases)
    assert len(default) == 5
    for axis, values in enumerate(axes):
        assert {case[axis] for case in default} == set(values)
