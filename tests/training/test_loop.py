"""The training loop: what an update gets, what callbacks see, how runs end, and what is refused."""

import csv
import signal
import struct
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

import rlfx
from rlfx.errors import NotFiniteError, ProgramError, TrainingError
from rlfx.training import CSV, Callback, Evaluate, Interrupt, Metrics, NaNGuard, Progress, Stop, TensorBoard, guard, run

KEY = jax.random.key(3)


def walk(agent, key):
    noise = jax.random.normal(key)
    return {"n": agent["n"] + 1, "x": agent["x"] + noise}, {"loss": {"a": noise}, "n": agent["n"]}


def start():
    return {"n": jnp.int32(0), "x": jnp.float32(0)}


def by_hand(updates):
    noise = [jax.random.normal(jax.random.fold_in(KEY, i)) for i in range(updates)]
    return np.cumsum(noise)


@pytest.mark.parametrize("per_call", [1, 3, 7, 50])
def test_an_update_gets_the_key_of_its_number(per_call):
    result = run(walk, start(), KEY, updates=7, per_call=per_call)
    np.testing.assert_allclose(result.agent["x"], by_hand(7)[-1], rtol=1e-6)
    assert (int(result.agent["n"]), result.done, result.reason) == (7, 7, "finished")


def test_no_updates_are_no_updates():
    assert run(walk, start(), KEY, updates=0).agent["n"] == 0


def test_many_agents_and_keys_in_the_agent():
    keys = jax.random.split(KEY, 3)
    agents = {"n": jnp.zeros(3, jnp.int32), "x": jnp.zeros(3), "key": keys}

    def update(agent, key):
        after, metrics = walk(
            {"n": agent["n"], "x": agent["x"]}, jax.random.fold_in(key, jax.random.bits(agent["key"]))
        )
        return {**after, "key": agent["key"]}, metrics

    together = run(jax.vmap(update), agents, keys, updates=5, per_call=2)
    for i in range(3):
        alone = run(update, jax.tree.map(lambda x: x[i], agents), keys[i], updates=5)
        np.testing.assert_allclose(together.agent["x"][i], alone.agent["x"], rtol=1e-6)


def test_one_buffer_twice_in_an_agent_and_numbers_of_python():
    """As parameters and their target are at first: each gets memory of its own; what was given stays usable."""
    params = jnp.ones(4)

    def update(agent, key):
        params, _, n = agent
        return (params + 1, params, n + 1), None

    agent = (params, params, 0)
    result = run(update, agent, KEY, updates=3)
    np.testing.assert_array_equal(result.agent[0], 4 * np.ones(4))
    np.testing.assert_array_equal(result.agent[1], 3 * np.ones(4))
    assert result.agent[2] == 3
    np.testing.assert_array_equal(params, np.ones(4))


def test_calls_are_donated_and_no_more_than_two_are_under_way():
    seen = []

    @dataclass(frozen=True)
    class Look(Callback):
        @contextmanager
        def opened(self, loop):
            yield lambda call: seen.append(call)

    run(walk, start(), KEY, updates=6, per_call=2, callbacks=[Look()])
    assert [(c.begun, c.done, c.last) for c in seen] == [(0, 2, False), (2, 4, False), (4, 6, True)]
    assert [c.agent["x"].is_deleted() for c in seen] == [True, True, False]
    assert [c.reaches(3) for c in seen] == [False, True, True]


def test_metrics_are_rows_of_updates(tmp_path):
    rows = []
    path, board = tmp_path / "deep" / "metrics.csv", tmp_path / "board"
    callbacks = [
        Metrics(CSV(path)),
        Metrics(lambda update, metrics: rows.append((update, metrics["loss/a"])), every=3),
        Metrics(TensorBoard(board)),
        Progress("walk", quiet=True),
    ]
    run(walk, start(), KEY, updates=7, per_call=4, callbacks=callbacks)
    with path.open() as file:
        table = list(csv.DictReader(file))
    assert [int(row["update"]) for row in table] == [1, 2, 3, 4, 5, 6, 7]
    assert [int(row["n"]) for row in table] == [0, 1, 2, 3, 4, 5, 6]
    noise = np.diff(by_hand(7), prepend=0.0)
    np.testing.assert_allclose([float(row["loss/a"]) for row in table], noise, rtol=1e-4, atol=1e-6)
    assert [update for update, _ in rows] == [3, 6]
    scalars = [(event.step, {v.tag: v.simple_value for v in event.summary.value}) for event in events(board)]
    assert [step for step, _ in scalars] == [1, 2, 3, 4, 5, 6, 7]
    np.testing.assert_allclose([values["loss/a"] for _, values in scalars], noise, rtol=1e-4, atol=1e-6)
    assert [values["n"] for _, values in scalars] == [0, 1, 2, 3, 4, 5, 6]


def test_metrics_of_many_agents_are_columns(tmp_path):
    path, board = tmp_path / "metrics.csv", tmp_path / "board"
    update = jax.vmap(walk)
    agents = jax.tree.map(lambda x: jnp.stack([x, x]), start())
    callbacks = [Metrics(CSV(path)), Metrics(TensorBoard(board))]
    run(update, agents, jax.random.split(KEY), updates=2, callbacks=callbacks)
    assert path.read_text().splitlines()[0] == "update,loss/a[0],loss/a[1],n[0],n[1]"
    tags = [[value.tag for value in event.summary.value] for event in events(board)]
    assert tags == [["loss/a_0_", "loss/a_1_", "n_0_", "n_1_"]] * 2  # brackets are not TensorBoard's


def events(board):
    """Of the one file, as TFRecords are: a length and its checksum before each, the event's own behind it."""
    (file,) = board.iterdir()
    data, found = file.read_bytes(), []
    while data:
        (size,) = struct.unpack_from("<Q", data)
        found.append(event_pb2.Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    assert found[0].file_version == "brain.Event:2"
    return found[1:]


def test_a_bar_shows_updates_and_metrics(capsys):
    run(walk, start(), KEY, updates=4, per_call=2, callbacks=[Progress("walk", names=("n", "other"))])
    shown = capsys.readouterr().err
    assert "walk: 100%" in shown
    assert "4/4" in shown
    assert "n=2.5" in shown


def test_evaluation_has_keys_of_its_own_and_changes_nothing():
    rows = []
    evaluate = Evaluate(
        lambda agent, key: {"x": agent["x"], "noise": jax.random.normal(key)}, 4, lambda u, m: rows.append((u, m))
    )
    result = run(walk, start(), KEY, updates=10, per_call=2, callbacks=[evaluate])
    assert [update for update, _ in rows] == [4, 8, 10]
    walked = by_hand(10)
    np.testing.assert_allclose([m["x"] for _, m in rows], walked[[3, 7, 9]], rtol=1e-5)
    np.testing.assert_allclose(result.agent["x"], walked[-1], rtol=1e-6)
    noise = {float(m["noise"]) for _, m in rows} | set(np.diff(walked, prepend=0.0).tolist())
    assert len(noise) == 13


def test_runs_end_early():
    until = Evaluate(lambda agent, key: agent["n"], 1, until=lambda n: n >= 4)
    result = run(walk, start(), KEY, updates=100, per_call=3, callbacks=[until])
    assert (result.done, result.reason) == (6, "evaluation of update 6")
    stop = Stop(lambda metrics: (metrics["n"] >= 4).any())
    result = run(walk, start(), KEY, updates=100, per_call=3, callbacks=[stop])
    assert (result.done, result.reason) == (6, "metrics of update 6")
    np.testing.assert_allclose(result.agent["x"], by_hand(6)[-1], rtol=1e-6)


@pytest.fixture
def interruptible():
    """Python's own handler: what a shell starts in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_after_the_call_and_a_second_one_at_once(tmp_path, capsys):
    def press(times):
        def write(update, metrics):
            for _ in range(times if update == 5 else 0):
                signal.raise_signal(signal.SIGINT)  # handled here: two from outside may become one

        return write

    usual = signal.getsignal(signal.SIGINT)
    rows = Metrics(CSV(tmp_path / "m.csv"))
    once = Evaluate(lambda agent, key: agent["n"], 1, press(1))
    result = run(walk, start(), KEY, updates=100, per_call=1, callbacks=[once, Interrupt(), rows])
    assert (result.done, result.reason) == (5, "SIGINT")
    assert len((tmp_path / "m.csv").read_text().splitlines()) == 6
    assert "once more stops at once" in capsys.readouterr().err
    twice = Evaluate(lambda agent, key: agent["n"], 1, press(2))
    with pytest.raises(KeyboardInterrupt):
        run(walk, start(), KEY, updates=100, callbacks=[twice, Interrupt()])
    assert signal.getsignal(signal.SIGINT) is usual

    errors = []

    def elsewhere():
        try:
            run(walk, start(), KEY, updates=1, callbacks=[Interrupt()])
        except TrainingError as error:
            errors.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "only the main thread receives signals" in errors[0]


def test_the_guard_names_the_update_the_part_and_the_equation():
    def breaks(agent, key):
        x = agent["x"] + jax.random.normal(key, (2,))
        x = jnp.where(agent["n"] == 6, jax.lax.scan(lambda c, _: (jnp.sqrt(-1.0 - c * c), None), x, None, 2)[0], x)
        return {"n": agent["n"] + 1, "x": x}, None

    first = {"n": jnp.int32(0), "x": jnp.zeros(2)}
    with pytest.raises(NotFiniteError) as error:
        run(breaks, first, KEY, updates=20, per_call=4, callbacks=[NaNGuard()])
    text = str(error.value)
    assert "agent['x'] became nan in update 7." in text
    assert "nan generated by primitive: sqrt at test_loop.py:" in text
    assert error.value.done == 6
    expected = run(breaks, first, KEY, updates=6).agent
    np.testing.assert_array_equal(error.value.agent["x"], expected["x"])


def test_the_guard_of_infinities_and_of_nothing():
    def grows(x, key):
        return x * jnp.float32(1e20), None

    with pytest.raises(NotFiniteError, match=r"agent became inf in update 2\.\n  No equation of it gave a NaN"):
        run(grows, jnp.float32(1.0), KEY, updates=5, callbacks=[NaNGuard(lambda x: ~jnp.isfinite(x))])
    assert run(walk, start(), KEY, updates=5, per_call=2, callbacks=[NaNGuard()]).done == 5


@pytest.mark.parametrize("bad", [jnp.isnan, lambda x: jnp.isnan(x)], ids=["numpy", "compiled"])
@pytest.mark.parametrize("part", ["a", "b", "half", "large", "count"])
def test_the_guard_looks_at_every_part(part, bad):
    """Small parts together, of each dtype, and large ones alone, where it is compiled."""
    first = {
        "a": jnp.zeros(1), "b": jnp.zeros((3, 2)), "count": jnp.int32(0), "empty": jnp.zeros((0, 2)),
        "half": jnp.zeros(4, jnp.bfloat16), "large": jnp.zeros((600, 600)), "key": KEY,
    }  # fmt: skip

    def update(agent, key):
        last = agent[part].at[..., -1:]
        broken = agent if part == "count" else {**agent, part: last.set(jnp.nan)}
        agent = jax.lax.cond(agent["count"] == 2, lambda: broken, lambda: agent)
        return {**agent, "count": agent["count"] + 1}, None

    train = partial(run, update, first, KEY, updates=6, per_call=2, callbacks=[NaNGuard(bad)])
    if part == "count":
        assert train().done == 6
        return
    with pytest.raises(NotFiniteError, match=rf"agent\['{part}'\] became nan in update 3\.") as error:
        train()
    assert (error.value.done, int(error.value.agent["count"])) == (2, 2)


def test_the_guard_compiles_nothing_where_numpy_looks(monkeypatch):
    monkeypatch.setattr(guard, "_joined", None)
    assert run(walk, start(), KEY, updates=4, per_call=2, callbacks=[NaNGuard(), NaNGuard(jnp.isinf)]).done == 4
    with pytest.raises(TypeError, match="not callable"):
        run(walk, start(), KEY, updates=4, per_call=2, callbacks=[NaNGuard(lambda x: jnp.isnan(x))])


def test_the_guard_on_a_mesh():
    """Each device's part is looked at."""
    mesh = jax.make_mesh((2,), ("b",))
    x = jax.device_put(jnp.arange(4.0), jax.NamedSharding(mesh, jax.P("b")))
    update = lambda agent, key: ({"x": jnp.sqrt(2.5 - agent["x"]), "n": agent["n"] + 1}, None)  # noqa: E731
    with pytest.raises(NotFiniteError, match=r"agent\['x'\] became nan in update 1\."):
        run(update, {"x": x, "n": jnp.int32(0)}, KEY, updates=2, callbacks=[NaNGuard()])


def test_the_guard_compiles_one_reduction_for_small_parts():
    agent = {f"w{i}": jnp.zeros((i + 1, 2)) for i in range(20)} | {"large": jnp.zeros((600, 600)), "n": jnp.int32(0)}
    looked = jax.make_jaxpr(lambda agent: [jnp.isnan(x).any() for x in guard._joined(agent)])(agent)
    names = [equation.primitive.name for equation in looked.eqns]
    assert (names.count("reduce_or"), names.count("concatenate")) == (2, 1)
    assert [x.size for x in guard._joined(agent)] == [600 * 600, sum(2 * (i + 1) for i in range(20))]


def test_the_guard_of_what_does_not_come_again():
    calls = []

    def host(x):
        calls.append(x)
        return np.float32(np.nan if len(calls) == 3 else x + 1)

    def update(x, key):
        return jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), x), None

    with pytest.raises(NotFiniteError, match="in the updates 1 to 4; made again one by one, it did not") as error:
        run(update, jnp.float32(0.0), KEY, updates=4, per_call=4, callbacks=[NaNGuard()])
    assert (error.value.agent, error.value.done) == (0.0, 0)


def test_the_guard_in_a_program():
    def program(w, x, t):
        return jnp.log(w + x) ** 2, x

    loss = rlfx.compile(program, length=3, batch=2)

    def update(w, key):
        return w - 0.3 + 0.01 * jax.grad(lambda w: loss(w, jnp.zeros(2))[0])(w), None

    with pytest.raises(
        NotFiniteError, match=r"agent became nan in update 5\.\n  Its first NaN: nan generated by primitive: log"
    ):
        run(update, jnp.float32(1.0), KEY, updates=20, per_call=5, callbacks=[NaNGuard()])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"update": 3}, TrainingError, r"update must be a function of \(agent, key\), got 3"),
        ({"updates": -1}, TrainingError, "updates must be an integer >= 0, got -1"),
        ({"per_call": 0}, TrainingError, "per_call must be a positive integer, got 0"),
        ({"key": 0}, TrainingError, "key must be a typed key, got int"),
        ({"callbacks": Progress()}, TrainingError, r"callbacks is Progress \(.*\), not a list of callbacks(.|\n)*=\[Progress"),
        ({"callbacks": [print]}, TrainingError, "which is no rlfx.training.Callback"),
        ({"update": lambda agent, key: agent}, TrainingError, r"update returned dict, not \(agent, metrics\)"),
        ({"update": lambda agent, key: ({**agent, "x": jnp.zeros(2)}, None)}, ProgramError,
         r"The agent that update returns\['x'\] is f32\[2\], the agent that it was given\['x'\] is f32\[\]"),
        ({"agent": {"n": jnp.int32(0), "x": "text"}}, ProgramError, "takes arrays, got 'text'"),
        ({"callbacks": [Metrics(3)]}, TrainingError, r"to must be a function of \(update, metrics\), got 3"),
        ({"callbacks": [Metrics("out.csv")]}, TrainingError, r"got 'out.csv'(.|\n)*Fix: Give to=CSV\('out.csv'\)"),
        ({"callbacks": [Metrics(Path("out.csv"))]}, TrainingError, r"Fix: Give to=CSV\('out.csv'\)"),
        ({"update": lambda agent, key: (agent, {"name": "walk"})}, ProgramError,
         r"The metrics that update returns\['name'\] must be arrays, got 'walk'.\n  at test_loop.py:\d+ (.|\n)*Give numbers"),
        ({"update": lambda agent, key: (agent, float(agent["x"]))}, TrainingError,
         r"update is jitted, and Python or NumPy .*\n  at test_loop.py:\d+ \(<lambda>\)\n  Fix: Return arrays: x.mean\(\) where"),
        ({"callbacks": [Evaluate(lambda agent, key: float(agent["x"]), 1)]}, TrainingError,
         r"fn is jitted, and Python or NumPy .*\n  at test_loop.py:\d+ \(<lambda>\)\n  Fix: Return arrays: x.mean\(\) where"),
        ({"callbacks": [Evaluate(lambda agent, key: {"name": "walk"}, 1)]}, ProgramError,
         r"The metrics that fn returns\['name'\] must be arrays, got 'walk'.\n  at test_loop.py:\d+ "),
        ({"callbacks": [Metrics(CSV("/dev/null/no"))]}, TrainingError, "/dev/null/no can't be written"),
        ({"callbacks": [Evaluate(lambda agent, key: 0, 0)]}, TrainingError, "every must be a positive integer, got 0"),
    ],
)  # fmt: skip
def test_what_is_refused(change, error, text):
    with pytest.raises(error, match=text):
        run(**{"update": walk, "agent": start(), "key": KEY, "updates": 2, **change})
