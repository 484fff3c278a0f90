"""Events decoded together against jax's own reader, which gives them one by one."""

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from rlfx.errors import ProfileError
from rlfx.profile import capture, columns, operation, xspace

pytestmark = pytest.mark.optimised

STATS = ("hlo_op", "hlo_module", "program_id", "run_id", "_p", "_c")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    f = jax.jit(lambda a: jax.lax.fori_loop(0, 40, lambda i, c: jnp.sin(c @ a), a))
    a = jnp.ones((16, 16))
    folder = tmp_path_factory.mktemp("trace")
    jax.block_until_ready(f(a))
    with capture(folder), operation("loop"):
        for _ in range(5):
            jax.block_until_ready(f(a))
    return xspace.find(folder)[-1]


def theirs(path, wanted):
    """`{plane: [(line, [(name, start, end, stats)])]}`."""
    out = {}
    for plane in ProfileData.from_file(str(path)).planes:
        out[plane.name] = [
            (
                line.name,
                [
                    (e.name, round(e.start_ns), round(e.start_ns) + round(e.duration_ns), dict(e.stats))
                    for e in line.events
                    if wanted(e.name)
                ],
            )
            for line in plane.lines
        ]
    return out


def ours(path, wanted, size):
    """The same, of the stats above."""
    out = {}
    for plane in xspace.read_trace(path).planes:
        lines = []
        for line in plane.lines:
            events = []
            for b in columns.blocks(plane, line, wanted, STATS, size):
                for i in range(len(b.start)):
                    numbers = {k: int(v[i]) for k, v in b.stats.items() if v[i] != columns.NONE}
                    found = {k: b.texts[n] if k in ("hlo_op", "hlo_module") else n for k, n in numbers.items()}
                    events.append((plane.events[int(b.name[i])], int(b.start[i]), int(b.end[i]), found))
            lines.append((line.name, events))
        out[plane.name] = lines
    return out


@pytest.mark.parametrize("wanted", [lambda name: True, lambda name: not name.startswith("end: ")], ids=["all", "some"])
@pytest.mark.parametrize("size", [1, 7, columns.BLOCK])
def test_columns_are_jax_s_events(path, wanted, size):
    expected, found = theirs(path, wanted), ours(path, wanted, size)
    assert found.keys() == expected.keys()
    count = 0
    for name in expected:
        assert [line for line, _ in found[name]] == [line for line, _ in expected[name]]
        for (_, mine), (_, events) in zip(found[name], expected[name], strict=True):
            assert len(mine) == len(events)
            count += len(events)
            for (label, start, end, stats), (label_, start_, end_, stats_) in zip(mine, events, strict=True):
                assert label == label_
                assert abs(start - start_) <= 1  # theirs are rounded from picoseconds as floats
                assert abs(end - end_) <= 2
                assert stats == {k: v for k, v in stats_.items() if k in STATS}
    assert count > 500


@pytest.mark.parametrize("piece", [16, 100, 1000])
def test_events_across_the_pieces_in_which_a_line_is_read(path, piece, monkeypatch):
    whole = ours(path, lambda name: True, columns.BLOCK)
    monkeypatch.setattr(columns, "PIECE", piece)
    assert ours(path, lambda name: True, columns.BLOCK) == whole


def test_an_event_that_is_cut_off(path):
    trace = xspace.read_trace(path)
    plane = next(p for p in trace.planes if p.name == "/host:CPU")
    line = max(plane.lines, key=lambda line: len(line.body))
    cut = line._replace(body=line.body[: len(line.body) - 3])
    with pytest.raises(ProfileError, match=r"truncated or not an XSpace: .*\n  Fix: Capture again"):
        list(columns.blocks(plane, cut, lambda name: True, STATS))
