"""Runs that go on bit by bit: resumed, killed, on other devices; and checkpoints that are broken, or of something else."""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import ProgramError, TrainingError
from rlfx.training import Checkpoints, Metrics, latest, run, save

sys.path.insert(0, str(Path(__file__).parent))
import resumed

KEY = jax.random.key(3)


def same(a, b):
    for x, y in zip(resumed.leaves(a), resumed.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def count(agent, key):
    noise = jax.random.normal(key, agent["x"].shape)
    return {"n": agent["n"] + 1, "x": agent["x"] + noise}, {"x": noise.sum()}


def counter():
    return {"n": jnp.int32(0), "x": jnp.zeros(3)}


def killed(name, directory, updates, kills, seed):
    """Start the run, kill it at random moments once there is a checkpoint, and let it end at last; the moments that were hit."""
    chance, during = random.Random(seed), 0
    command = [sys.executable, resumed.__file__, name, str(directory), str(updates)]
    root = str(Path(rlfx.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    for _ in range(kills):
        before = set(os.listdir(directory)) if directory.exists() else set()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while process.poll() is None and not (directory.exists() and set(os.listdir(directory)) - before):
            time.sleep(0.01)
        assert process.poll() is None, process.stderr.read().decode()[-2000:]
        time.sleep(chance.uniform(0.0, 0.25))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended before it was killed: give it more updates"
        process.stderr.close()
        during += any(not name.isdigit() for name in os.listdir(directory))  # a save was under way
    return during


def check_kills(name, tmp_path, kills, seed, updates=1_000_000):
    update, start = resumed.RUNS[name]
    directory = tmp_path / "checkpoints"
    during = killed(name, directory, updates, kills, seed)
    agent, key = start()
    found = latest(directory, agent, key)
    assert found is None or found[1] < updates
    expected = run(update, agent, key, updates=(found[1] if found else 0) + 4, per_call=3)
    result = run(update, agent, key, updates=expected.done, per_call=2, callbacks=[Checkpoints(directory)])
    same(result.agent, expected.agent)
    return during


def test_killed_three_times_it_goes_on_bit_by_bit(tmp_path):
    check_kills("walk", tmp_path, kills=3, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", resumed.RUNS)
def test_killed_fifty_times_it_goes_on_bit_by_bit(name, tmp_path):
    assert check_kills(name, tmp_path, kills=50, seed=1) >= 5, "hardly any save was interrupted"


def test_a_replay_agent_goes_on_as_if_never_stopped(tmp_path):
    """Whatever a call is; also beyond the number of updates asked for at first. The caller's agent is not donated."""
    agent, key = resumed.start_replay()
    whole = run(resumed.update, agent, key, updates=7, per_call=3)
    for updates, per_call in ((2, 1), (5, 2), (7, 4)):
        result = run(
            resumed.update, agent, key, updates=updates, per_call=per_call, callbacks=[Checkpoints(tmp_path, 2)]
        )
        assert (result.done, result.reason) == (updates, "finished")
    same(result.agent, whole.agent)
    same(agent, resumed.start_replay()[0])
    again = run(resumed.update, agent, key, updates=7, per_call=4, callbacks=[Checkpoints(tmp_path, 2)])
    same(again.agent, whole.agent)


def test_on_a_mesh_and_on_another_number_of_devices(tmp_path):
    def f(w, carry, t):
        x, moments = rlfx.normalize(carry[0] * w + jax.random.normal(t.key_for("x")), carry[1])
        return jnp.square(x - w), (x, moments)

    def make(devices):
        mesh = jax.make_mesh((devices,), ("b",)) if devices else None
        loss = rlfx.compile(f, length=3, batch=4, mesh=mesh)

        def update(agent, key):
            (value, (carry, _)), grad = jax.value_and_grad(loss, has_aux=True)(agent[0], agent[1], key)
            return (agent[0] - 0.1 * grad, carry), value

        return update

    agent = (jnp.float32(0.5), (jnp.zeros(4), rlfx.Shared(rlfx.Moments.of(0.0))))
    two, four = make(2), make(4)
    whole = run(two, agent, KEY, updates=6, per_call=2)
    run(two, agent, KEY, updates=4, per_call=2, callbacks=[Checkpoints(tmp_path)])
    saved = latest(tmp_path, agent, KEY)
    assert saved is not None
    assert saved[1] == 4
    same(run(two, agent, KEY, updates=6, callbacks=[Checkpoints(tmp_path, 100)]).agent, whole.agent)
    other = run(four, agent, KEY, updates=8, callbacks=[Checkpoints(tmp_path, 100)]).agent
    expected = run(two, agent, KEY, updates=8).agent
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), other, expected)


def damage(directory, step, begin=None, end=None):
    """Turn bits in a part of a checkpoint: in its arrays, which are behind its first line."""
    file = directory / str(step)
    data = bytearray(file.read_bytes())
    span = slice(data.index(b"\n") + 1 if begin is None else begin, end)
    data[span] = bytes(byte ^ 0x15 for byte in data[span])
    file.write_bytes(data)


def test_the_last_good_checkpoint_is_used(tmp_path):
    run(count, counter(), KEY, updates=6, callbacks=[Checkpoints(tmp_path, 2)])
    damage(tmp_path, 6)
    with pytest.warns(UserWarning, match=r"broken checkpoints 6 \(.*going on from 4"):
        result = run(count, counter(), KEY, updates=7, callbacks=[Checkpoints(tmp_path, 2)])
    same(result.agent, run(count, counter(), KEY, updates=7).agent)
    assert sorted(int(p.name) for p in tmp_path.iterdir()) == [4, 6, 7]
    for step in (4, 6, 7):
        damage(tmp_path, step)
    with pytest.raises(TrainingError, match=r"No checkpoint in .* can be read: 7 \(") as error:
        run(count, counter(), KEY, updates=9, callbacks=[Checkpoints(tmp_path, 2)])
    assert "begin anew" in str(error.value)


@pytest.mark.parametrize(
    ("begin", "end", "fact"),
    [
        (None, None, r"\['n'\] is not what was saved"),
        (-1, None, r"\['x'\] is not what was saved"),
        (0, 1, "its first line is not what was saved"),
        (20, 21, "its first line is not what was saved"),
    ],
)
def test_bits_that_turned_are_found_wherever_they_are(begin, end, fact, tmp_path):
    run(count, counter(), KEY, updates=4, callbacks=[Checkpoints(tmp_path, 2)])
    damage(tmp_path, 4, begin, end)
    with pytest.warns(UserWarning, match=rf"broken checkpoints 4 \(ValueError: {fact}\)"):
        assert latest(tmp_path, counter(), KEY)[1] == 2


def test_what_is_not_complete_is_never_read(tmp_path):
    """What a killed process leaves has another name; the next run removes it, and nothing else that lies there."""
    run(count, counter(), KEY, updates=4, callbacks=[Checkpoints(tmp_path, 2)])
    shutil.copy(tmp_path / "4", tmp_path / "6.part")
    (tmp_path / "notes.part").write_text("of mine")
    assert latest(tmp_path, counter(), KEY)[1] == 4
    assert (tmp_path / "6.part").exists()
    run(count, counter(), KEY, updates=5, callbacks=[Checkpoints(tmp_path, 2)])
    assert sorted(os.listdir(tmp_path)) == ["2", "4", "5", "notes.part"]


@pytest.mark.parametrize("lost", ["it all", "its end", "a directory"])
def test_a_checkpoint_that_lost_its_contents_is_broken(lost, tmp_path):
    run(count, counter(), KEY, updates=4, callbacks=[Checkpoints(tmp_path, 2)])
    file = tmp_path / "4"
    if lost == "a directory":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(file.read_bytes()[: 0 if lost == "it all" else file.stat().st_size - 8])
    fact = {"it all": "ValueError: its first", "its end": "ValueError: 8 bytes of 16", "a directory": "FileNotFoundError"}[lost]
    with pytest.warns(UserWarning, match=rf"broken checkpoints 4 \({fact}"):
        assert latest(tmp_path, counter(), KEY)[1] == 2
    with pytest.warns(UserWarning, match="broken checkpoints 4"):
        run(count, counter(), KEY, updates=4, callbacks=[Checkpoints(tmp_path, 2)])
    assert latest(tmp_path, counter(), KEY)[1] == 4


def test_checkpoints_of_something_else_are_refused(tmp_path, monkeypatch):
    run(count, counter(), KEY, updates=2, callbacks=[Checkpoints(tmp_path)])

    def go_on(agent=None, key=KEY, update=count):
        run(update, agent or counter(), key, updates=3, callbacks=[Checkpoints(tmp_path)])

    with pytest.raises(TrainingError, match="was written by a run with another key"):
        go_on(key=jax.random.key(4))
    with pytest.raises(TrainingError, match=r"has float32\[3\] for agent\['x'\], the agent given has float32\[4\]"):
        go_on({"n": jnp.int32(0), "x": jnp.zeros(4)})
    with pytest.raises(TrainingError, match=r"has nothing for agent\['y'\]"):
        go_on({**counter(), "y": jnp.zeros(1)}, update=lambda agent, key: (agent, None))
    monkeypatch.setattr(rlfx.training.checkpoints, "_FORMAT", 4)
    with pytest.raises(TrainingError, match="Checkpoint 2 has format 3, this rlfx reads 4"):
        go_on()


def test_checkpoints_of_another_format_are_refused_and_stay(tmp_path):
    """Format 2 was a directory by orbax. It is only removed where more than ``keep`` are there."""
    for step in (2, 4):
        (tmp_path / str(step) / "about").mkdir(parents=True)
        (tmp_path / str(step) / "about" / "metadata").write_text('{"format": 2, "done": 4, "leaves": []}')
    with pytest.raises(TrainingError, match="Checkpoint 4 has format 2, this rlfx reads 3") as error:
        run(count, counter(), KEY, updates=6, callbacks=[Checkpoints(tmp_path)])
    assert "Read it with the rlfx that wrote it, or give another directory" in str(error.value)
    assert sorted(os.listdir(tmp_path)) == ["2", "4"]
    save(tmp_path, counter(), 6, KEY, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["4", "6"]


def test_every_kind_of_array_comes_back(tmp_path):
    """Of each width, none at all, and keys; one after another they are not where their type would be aligned."""
    agent = {
        "flags": jnp.array([True, False, True]), "empty": jnp.zeros((0, 2)), "half": jnp.arange(3, dtype=jnp.bfloat16),
        "image": jnp.arange(5, dtype=jnp.uint8), "key": jax.random.split(KEY, 3), "n": jnp.int32(-4), "none": None,
        "transposed": jnp.arange(6.0).reshape(2, 3).T,
    }  # fmt: skip
    save(tmp_path / "all", agent, 1, KEY)
    like = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.zeros_like(x), agent)
    found, _ = latest(tmp_path / "all", {**like, "key": jax.random.split(jax.random.key(9), 3)}, KEY)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(lambda x: (x.shape, x.dtype), agent)
    same(found, agent)
    save(tmp_path / "nothing", (), 2, KEY)
    assert latest(tmp_path / "nothing", (), KEY) == ((), 2)


def test_numbers_and_arrays_of_numpy_are_what_a_run_makes_of_them(tmp_path):
    agent = (jnp.arange(2.0), 3, 1.5, True, np.arange(3), np.float32(2.5))
    save(tmp_path / "saved", agent, 1, KEY)
    for like in (agent, jax.tree.map(jnp.asarray, agent), jax.eval_shape(lambda: jax.tree.map(jnp.asarray, agent))):
        found, done = latest(tmp_path / "saved", like, KEY)
        assert done == 1
        assert all(isinstance(x, jax.Array) for x in found)
        assert [x.dtype for x in found] == [jnp.asarray(x).dtype for x in agent]
        same(found, jax.tree.map(jnp.asarray, agent))
    result = run(lambda agent, key: ((agent[0] + 1, agent[1] + 1), None), (jnp.zeros(2), 0), KEY, updates=3,
                 callbacks=[Checkpoints(tmp_path / "run")])  # fmt: skip
    same(latest(tmp_path / "run", (np.zeros(2, np.float32), 0), KEY)[0], result.agent)
    with pytest.raises(TrainingError, match=r"has int32\[\] for agent\[1\], the agent given has float32\[\]"):
        latest(tmp_path / "run", (jnp.zeros(2), 0.0), KEY)
    for text in ("agent takes arrays, got 'sgd'", "Give numbers, arrays, or a pytree of them"):
        with pytest.raises(ProgramError, match=text):
            save(tmp_path / "saved", {"x": jnp.zeros(2), "name": "sgd"}, 2, KEY)
    with pytest.raises(ProgramError, match="agent takes arrays, got ShapeDtypeStruct"):
        save(tmp_path / "saved", jax.ShapeDtypeStruct((2,), jnp.float32), 2, KEY)


def test_types_alone_are_enough_to_read(tmp_path):
    def init(key):
        return {"w": jax.random.normal(key, (2, 3)), "key": jax.random.split(key), "n": jnp.int32(4)}

    agent = init(KEY)
    save(tmp_path, agent, 5, KEY)
    found, done = latest(tmp_path, jax.eval_shape(init, jax.random.key(0)))
    assert done == 5
    assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, agent)
    same(found, agent)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), agent)
    found, _ = latest(tmp_path, types)
    assert all(x.devices() == {jax.devices()[-1]} for x in jax.tree.leaves(found))
    same(found, agent)


def test_the_state_of_flax_comes_back(tmp_path):
    """Its step is a number of Python's."""
    train_state, optax = pytest.importorskip("flax.training.train_state"), pytest.importorskip("optax")
    optimiser = optax.sgd(0.1, momentum=0.9)

    def new(w):
        return train_state.TrainState.create(apply_fn=None, params={"w": w}, tx=optimiser)

    def update(state, key):
        return state.apply_gradients(grads={"w": state.params["w"]}), None

    result = run(update, new(jnp.ones(2)), KEY, updates=3, callbacks=[Checkpoints(tmp_path / "run")])
    found, done = latest(tmp_path / "run", new(jnp.zeros(2)), KEY)
    assert (done, int(found.step)) == (3, 3)
    same(found, result.agent)
    save(tmp_path / "new", new(jnp.ones(2)), 0, KEY)
    same(latest(tmp_path / "new", new(jnp.zeros(2)))[0].params, {"w": jnp.ones(2)})


def test_a_loop_of_ones_own_saves(tmp_path):
    """What `save` writes is what `latest` reads and `run` goes on from; the oldest go."""
    agent = counter()
    for done in range(1, 5):
        agent, _ = count(agent, jax.random.fold_in(KEY, done - 1))
        save(tmp_path, agent, done, KEY, keep=2)
    found, done = latest(tmp_path, counter(), KEY)
    assert done == 4
    same(found, agent)
    assert sorted(name for name in os.listdir(tmp_path) if name.isdigit()) == ["3", "4"]
    result = run(count, counter(), KEY, updates=6, callbacks=[Checkpoints(tmp_path)])
    same(result.agent, run(count, counter(), KEY, updates=6).agent)
    with pytest.raises(TrainingError, match="save: done must be an integer >= 0, got -1"):
        save(tmp_path, agent, -1, KEY)
    with pytest.raises(TrainingError, match="save: keep must be an integer >= 2, got 1"):
        save(tmp_path, agent, 5, KEY, keep=1)


def test_a_full_disk_is_said_and_whole_checkpoints_stay(tmp_path):
    """The size of files is limited in a process of its own: writing more is the same error as a full disk's."""
    program = f"""
import resource, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import jax, jax.numpy as jnp
from rlfx.training import Checkpoints, run
from rlfx.errors import TrainingError
def update(x, key):
    return x + jax.random.normal(key, x.shape), None
agent, key = jnp.zeros(500_000), jax.random.key(0)
run(update, agent, key, updates=1, callbacks=[Checkpoints({str(tmp_path / "c")!r})])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    run(update, agent, key, updates=3, callbacks=[Checkpoints({str(tmp_path / "c")!r})])
except TrainingError as error:
    print("refused:", error)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(rlfx.__file__).parents[1])}
    out = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "refused: Checkpoints in" in out.stdout, out.stderr[-2000:]
    assert "can't be written" in out.stdout
    assert latest(tmp_path / "c", jnp.zeros(500_000), jax.random.key(0))[1] == 1


READ_ONLY = """
import os, sys
import jax, jax.numpy as jnp
from rlfx.errors import TrainingError
from rlfx.training import Checkpoints, run
if os.getuid() == 0:
    os.setuid(65534)  # to root every directory can be written
try:
    run(lambda x, key: (x + 1, None), jnp.int32(0), jax.random.key(0), updates=1, callbacks=[Checkpoints(sys.argv[1])])
except TrainingError as error:
    print("refused:", error)
"""


def test_a_directory_that_is_read_only_is_said(tmp_path):
    """Where there is nothing yet, by somebody who may not write there."""
    place = Path(tempfile.mkdtemp())  # pytest's own directories are closed to others
    try:
        place.chmod(0o555)
        environment = {**os.environ, "PYTHONPATH": str(Path(rlfx.__file__).parents[1])}
        command = [sys.executable, "-c", READ_ONLY, str(place / "c")]
        out = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert f"refused: Checkpoints in {place / 'c'} can't be written: PermissionError" in out.stdout, out.stderr[-2000:]
        assert "Give a directory that can be written" in out.stdout
    finally:
        place.chmod(0o755)
        shutil.rmtree(place)


def test_a_directory_that_can_not_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"Checkpoints in .*file/c can't be written: NotADirectoryError"):
        run(count, counter(), KEY, updates=1, callbacks=[Checkpoints(tmp_path / "file" / "c")])
    with pytest.raises(TrainingError, match="keep must be an integer >= 2, got 1"):
        run(count, counter(), KEY, updates=1, callbacks=[Checkpoints(tmp_path / "c", keep=1)])


def test_rows_go_on_behind_the_checkpoint(tmp_path):
    """Rows that were written after the last checkpoint are made again, and are in the file once."""
    file = tmp_path / "metrics.csv"

    def go(updates, stop=None):
        def write_or_die(update, metrics):
            if update == stop:
                raise KeyboardInterrupt

        callbacks = [Metrics(rlfx.training.CSV(file)), Metrics(write_or_die), Checkpoints(tmp_path / "c", 4)]
        return run(count, counter(), KEY, updates=updates, per_call=2, callbacks=callbacks)

    with pytest.raises(KeyboardInterrupt):
        go(12, stop=7)
    go(12)
    rows = np.genfromtxt(file, delimiter=",", names=True)
    np.testing.assert_array_equal(rows["update"], np.arange(1, 13))
    whole = []
    run(count, counter(), KEY, updates=12, callbacks=[Metrics(lambda update, m: whole.append(m["x"]))])
    np.testing.assert_allclose(rows["x"], whole, rtol=1e-6)
