"""RL-Scope's findings on scripts of others, for docs/profile-case-studies.md, from results/profile_variants.json."""

from __future__ import annotations

from benchmarks.tables_markdown import number, percent, read, rows, table, times

PARTS = ("simulation", "collection", "inference", "backpropagation", "other")


def found() -> list[dict]:
    return rows("profile_variants")


def studied(study: str) -> list[dict]:
    return [r for r in found() if r["study"] == study]


def one(study: str, name: str) -> dict:
    (row,) = [r for r in studied(study) if r["name"] == name]
    return row


def part(row: dict, name: str) -> float:
    """ms of a profiled step, without what is compiled: a window may hold the beginning."""
    return sum(ms for state, ms in row["ms"].get(name, {}).items() if state not in ("compile", "import"))


def whole(row: dict) -> float:
    return sum(part(row, name) for name in row["ms"])


def steady(row: dict) -> bool:
    """Is the window of steps alone? Eager jax compiles so many functions that it held the beginning."""
    return row["compile_share"] < 0.1


def shares(row: dict) -> str:
    if row["backend"] == "JAX":  # on a busy machine most of their windows is waiting for a processor
        return "-"
    return " / ".join(percent(part(row, name) / whole(row)) if name in row["ms"] else "-" for name in PARTS)


def of(study: str) -> str:
    mine = studied(study)
    least = min(r["ms_a_step"] for r in mine)
    return table(
        mine,
        {
            "script": lambda r: r["name"],
            "backend": lambda r: r["backend"],
            "execution": lambda r: r["model"],
            "CPU ms a step": lambda r: number(r["ms_a_step"]),
            "over the least": lambda r: times(r["ms_a_step"] / least),
            "calls of jax a step": lambda r: number(r["calls_of_jax_a_step"]) if r["backend"] == "JAX" and steady(r) else "-",
            f"{' / '.join(PARTS)}": shares,
        },
    )


def cpu(row: dict, name: str) -> float:
    """CPU ms of a part of a step without the profiler, as the profile divides the step."""
    return part(row, name) / whole(row) * row["ms_a_step"]


def ratio(study: str, slow: str, fast: str) -> str:
    return times(one(study, slow)["ms_a_step"] / one(study, fast)["ms_a_step"])


TABLES = {
    f"variants-{name}": lambda study=study: of(study)
    for name, study in {
        "dqn": "DQN, CartPole-v1",
        "td3": "TD3, Hopper-v5",
        "ddpg": "DDPG, Pendulum-v1",
    }.items()
}

DQN, TD3, DDPG = "DQN, CartPole-v1", "TD3, Hopper-v5", "DDPG, Pendulum-v1"
DQN_JAX, TD3_JAX = "CleanRL dqn_jax.py", "CleanRL td3_continuous_action_jax.py"
TF, TORCH, LEAN = "TF-Agents train_eval.py", "SB3 DDPG", "LeanRL dqn_torchcompile.py"


def graph(consecutive: int) -> dict:
    return one(DDPG, f"{TF}, use_tf_functions, {consecutive} consecutive")


def in_python(row: dict) -> str:
    """CPU ms of Python a step in the data collection."""
    return number(row["ms"]["collection"].get("python", 0.0) / whole(row) * row["ms_a_step"])


def long_brax() -> dict:
    """A window of brax that ended at three million events: `--start 60 --duration 75 --events 3000000 --memory 12000`."""
    (row,) = read("profile_brax_long")["scripts"]
    return row


VALUES = {
    "variants-brax": lambda: number(long_brax()["seconds"] * long_brax()["device_busy"]),
    "variants-brax-simulation": lambda: percent(long_brax()["device"]["simulation"]),
    "variants-jax-dqn": lambda: ratio(DQN, f"{DQN_JAX}, JAX_DISABLE_JIT=1", DQN_JAX),
    "variants-jax-td3": lambda: ratio(TD3, f"{TD3_JAX}, JAX_DISABLE_JIT=1", TD3_JAX),
    "variants-torch-td3": lambda: ratio(TD3, f"{TD3_JAX}, JAX_DISABLE_JIT=1", "CleanRL td3_continuous_action.py"),
    "variants-graph-td3": lambda: ratio(TD3, "CleanRL td3_continuous_action.py", TD3_JAX),
    "variants-tf": lambda: ratio(DDPG, f"{TF}, 1 consecutive", f"{TF}, use_tf_functions, 1 consecutive"),
    "variants-tf-torch-learner": lambda: times(
        cpu(one(DDPG, f"{TF}, 1 consecutive"), "backpropagation") / cpu(one(DDPG, f"{TORCH}, 1 consecutive"), "backpropagation")
    ),
    "variants-tf-torch": lambda: ratio(DDPG, f"{TF}, 1 consecutive", f"{TORCH}, 1 consecutive"),
    "variants-graph-torch": lambda: ratio(DDPG, f"{TORCH}, 1 consecutive", f"{TF}, use_tf_functions, 100 consecutive"),
    "variants-compiled": lambda: ratio(DQN, f"{LEAN} --compile", LEAN),
    "variants-few": lambda: times(graph(1)["ms_a_step"] / graph(100)["ms_a_step"]),
    "variants-python-1": lambda: in_python(graph(1)),
    "variants-python-100": lambda: in_python(graph(100)),
    "variants-inference": lambda: number(cpu(one(DQN, LEAN), "inference")),
    "variants-inference-compiled": lambda: number(cpu(one(DQN, f"{LEAN} --compile"), "inference")),
}
