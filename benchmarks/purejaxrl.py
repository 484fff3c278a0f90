"""PureJaxRL's own `ppo.py`, from a checkout of the pinned commit, under today's gymnax: the peer of `ppo_full.py`.

The file is read from a git repository (a clone, or a bare one) at the pinned commit and executed; nothing of it is kept
here. Where files travelled without their repository, those of that commit will do. It was written for gymnax 0.0.x. What the shim
does, and all it does:

* `gymnax.make` returns gymnax's own `LegacyStepAPIWrapper` around the environment: one `done` instead of
  `terminated, truncated`;
* `wrappers` (PureJaxRL's second file) is executed with empty modules in place of `navix` and of brax's training wrappers,
  which it imports for other environments.

`distrax` is the real one: `pip install distrax==0.1.9 tfp-nightly` (tensorflow-probability's release does not import
under jax 0.10).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable

REPOSITORY = "https://github.com/luchris429/purejaxrl"
COMMIT = "31756b197773a52db763fdbe6d635e4b46522a73"
#: Of the two files there.
DIGESTS = {
    "purejaxrl/ppo.py": "6650c9f8943ed67e8d287d0dd1536e49d8f603e04550cdc506727e46b34024fd",
    "purejaxrl/wrappers.py": "b2dafeafdf83755336d2455955b868bf1d7cb02eeddd81c1591714886651900f",
}
DEFAULTS = {
    "LR": 2.5e-4,
    "NUM_ENVS": 4,
    "NUM_STEPS": 128,
    "TOTAL_TIMESTEPS": 5e5,
    "UPDATE_EPOCHS": 4,
    "NUM_MINIBATCHES": 4,
    "GAMMA": 0.99,
    "GAE_LAMBDA": 0.95,
    "CLIP_EPS": 0.2,
    "ENT_COEF": 0.01,
    "VF_COEF": 0.5,
    "MAX_GRAD_NORM": 0.5,
    "ACTIVATION": "tanh",
    "ENV_NAME": "CartPole-v1",
    "ANNEAL_LR": True,
    "DEBUG": False,
}


def load(checkout: str) -> types.ModuleType:
    """PureJaxRL's ``ppo`` module at the pinned commit of the repository at ``checkout``."""
    if importlib.util.find_spec("distrax") is None:
        sys.exit("PureJaxRL needs distrax: pip install distrax==0.1.9 tfp-nightly")
    with _stand_ins():
        _execute(checkout, "purejaxrl/wrappers.py", "wrappers")
        ppo = _execute(checkout, "purejaxrl/ppo.py", "purejaxrl_ppo")
    ppo.gymnax = types.SimpleNamespace(make=_legacy_make)  # the module's own name; the package is left alone
    return ppo


def make_train(checkout: str, **config: object) -> Callable:
    """``train(key) -> {"runner_state", "metrics"}`` of the pinned file; ``config`` overrides its defaults."""
    unknown = set(config) - set(DEFAULTS)
    if unknown:
        raise KeyError(f"PureJaxRL's configuration has no {sorted(unknown)}.")
    return load(checkout).make_train({**DEFAULTS, **config})


def _legacy_make(name: str, **kwargs: object) -> tuple:
    import gymnax
    from gymnax.wrappers import LegacyStepAPIWrapper

    env, params = gymnax.make(name, **kwargs)
    return LegacyStepAPIWrapper(env), params


def _text(checkout: str, path: str) -> str:
    """A file at the pinned commit."""
    file = pathlib.Path(checkout, path)
    if file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() == DIGESTS[path]:
        return file.read_text()
    show = subprocess.run(["git", "-C", checkout, "show", f"{COMMIT}:{path}"], capture_output=True, text=True)
    if show.returncode:
        sys.exit(f"{checkout} has no commit {COMMIT[:8]}: git clone {REPOSITORY} and give its path.\n{show.stderr}")
    return show.stdout


def _execute(checkout: str, path: str, name: str) -> types.ModuleType:
    text = _text(checkout, path)
    module = types.ModuleType(name)
    sys.modules[name] = module  # flax looks up the module of a dataclass, and ppo imports wrappers
    exec(compile(text, f"{COMMIT[:8]}:{path}", "exec"), module.__dict__)
    return module


@contextlib.contextmanager
def _stand_ins():
    """Empty modules for what ``wrappers.py`` imports and CartPole does not use."""
    names = ("navix", "brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training")
    kept = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    sys.modules["brax"].envs = sys.modules["brax.envs"]  # type: ignore[attr-defined]
    training = sys.modules["brax.envs.wrappers.training"]
    training.EpisodeWrapper = training.AutoResetWrapper = None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
