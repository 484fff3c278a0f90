"""Functions that trace: few collections meanwhile, and the threshold is what it was afterwards."""

import gc
import threading

import pytest

from rlfx._tracing import OBJECTS, traces


@pytest.fixture(autouse=True)
def threshold():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_few_collections_while_it_runs():
    counted = []
    gc.callbacks.append(lambda phase, info: counted.append(phase))
    try:
        traces(lambda: [[] for _ in range(OBJECTS // 2)])()
        during = len(counted)
        kept = [[] for _ in range(OBJECTS // 2)]
    finally:
        gc.callbacks.pop()
    assert during == 0
    assert len(counted) > 10
    assert kept


def test_the_threshold_is_as_it_was():
    inner = traces(gc.get_threshold)
    assert traces(lambda: (inner(), gc.get_threshold()))() == ((OBJECTS, 10, 10),) * 2
    assert gc.get_threshold() == (700, 10, 10)


def test_so_it_is_after_an_error():
    with pytest.raises(ZeroDivisionError):
        traces(lambda: 1 // 0)()
    assert gc.get_threshold() == (700, 10, 10)


def test_and_after_the_last_of_several_threads():
    first, second = threading.Event(), threading.Event()

    def outer():
        first.set()
        second.wait(10)

    thread = threading.Thread(target=traces(outer))
    thread.start()
    first.wait(10)
    traces(lambda: None)()
    assert gc.get_threshold()[0] == OBJECTS
    second.set()
    thread.join()
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (10 * OBJECTS, 5, 5)])
def test_rarer_collections_stay_as_they_are(own):
    gc.set_threshold(*own)
    assert traces(gc.get_threshold)() == own == gc.get_threshold()


def test_a_threshold_that_someone_sets_meanwhile_stays():
    traces(lambda: gc.set_threshold(1234, 5, 6))()
    assert gc.get_threshold() == (1234, 5, 6)


def test_it_is_the_function():
    def fn(a, *rest, b=0, **others):
        return a, rest, b, others

    assert traces(fn)(1, 2, b=3, c=4) == (1, (2,), 3, {"c": 4})
    assert traces(fn).__name__ == "fn"
