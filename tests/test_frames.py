"""Calls with room for frames: a loop of calls costs the same at any depth."""

import resource

from rlfx._frames import with_room

CALLS = 200


def leaf(a, b):
    return a


def faults(depth):
    """Page faults of a loop of calls below ``depth`` frames."""
    if depth:
        return faults(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        leaf(1, 2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def most():
    """At the worst depth; a piece of frames is some 120 of these."""
    return max(map(faults, range(300)))


def test_no_depth_makes_and_frees_a_piece_in_every_call():
    assert with_room(most)() < CALLS / 4


def test_a_call_with_room_is_the_call():
    def fn(a, *rest, b=0, **others):
        return a, rest, b, others

    roomy = with_room(fn)
    assert roomy(1, 2, b=3, c=4) == (1, (2,), 3, {"c": 4})
    assert roomy.__name__ == "fn"
