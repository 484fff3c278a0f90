"""`python -m rlfx`: versions, devices, extras, and a self-test of a few seconds. Paste it into a bug report."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import rlfx
import rlfx.envs


def requirements() -> dict[str, list[str]]:
    """Names of the packages of each extra; those that rlfx always needs under the empty name.

    Example:
      >>> "jax" in requirements()[""]
      True
    """
    found: dict[str, list[str]] = {}
    for text in importlib.metadata.requires("rlfx") or []:
        name, extra = re.match(r"[\w.-]+", text), re.search(r"extra == ['\"]([\w-]+)['\"]", text)
        if name is not None and name[0] != "rlfx":
            found.setdefault(extra[1] if extra else "", []).append(name[0])
    return found


def version(package: str) -> str | None:
    """The installed version of a package; None without one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> Iterator[str]:
    """One line each: what runs here, on what."""
    yield f"rlfx {version('rlfx') or '(not installed)'} at {rlfx.__path__[0]}"
    yield f"Python {platform.python_version()}, {platform.platform()}"
    needed = ["jaxlib", *(requirements().get("", []) if version("rlfx") else ["jax", "numpy"])]
    yield ", ".join(f"{package} {version(package) or 'missing'}" for package in sorted(needed))
    for platform_name in sorted({device.platform for device in jax.devices()}):
        devices = jax.devices(platform_name)
        yield f"{len(devices)} {platform_name} device{'s' * (len(devices) > 1)}: {devices[0].device_kind}"
    changed = {"jax_enable_x64": False, "jax_numpy_dtype_promotion": "standard", "jax_debug_nans": False}
    settings = [
        f"{name}={getattr(jax.config, name)}" for name, usual in changed.items() if getattr(jax.config, name) != usual
    ]
    yield f"settings of jax: {', '.join(settings) or 'as usual'}"


def extras() -> Iterator[str]:
    """One line an extra: the versions of its packages, or how to install them."""
    for extra, packages in sorted(requirements().items() if version("rlfx") else ()):
        if extra in ("", "dev", "docs", "test"):
            continue
        missing = [package for package in packages if version(package) is None]
        if missing:
            yield f"{extra}: no {', '.join(missing)}; pip install 'rlfx[{extra}]'"
        else:
            yield f"{extra}: {', '.join(f'{package} {version(package)}' for package in packages)}"


# -- the self-test ----------------------------------------------------------------------------------------------------


def returns(w, carry, t):
    """Discounted rewards to go, times a weight."""
    reward = rlfx.series(w * carry)
    return rlfx.discounted_sum(reward[t:], 0.5) * t.astype(jnp.float32), carry + jax.random.uniform(t.key)


def check_reference() -> None:
    """Values and gradients of a compiled program are those of the reference interpreter."""
    args = (jnp.float32(2.0), jnp.array([1.0, 3.0], jnp.float32), jax.random.key(0))
    found = [
        jax.value_and_grad(lambda w, f=f: f(w, *args[1:])[0])(args[0])
        for f in (rlfx.compile(returns, length=4, batch=2), rlfx.reference(returns, length=4, batch=2))
    ]
    np.testing.assert_allclose(*(np.array(pair) for pair in found), rtol=1e-5)


def check_numpy() -> None:
    """Rewards to go are those of a loop."""
    rewards = np.arange(5, dtype=np.float32)
    run = rlfx.unroll(lambda xs, c, t: (c, rlfx.discounted_sum(rlfx.inputs(xs)[t:], 0.5)), length=5)
    expected, total = [], 0.0
    for reward in rewards[::-1]:
        total = reward + 0.5 * total
        expected.append(total)
    np.testing.assert_allclose(run(rewards, None)[1], expected[::-1], rtol=1e-6)


def check_environments() -> None:
    """Fused environment steps are those of a scan."""
    env, key = rlfx.envs.make("CartPole-v1"), jax.random.key(0)
    states = jax.vmap(env.reset)(jax.random.split(key, 4))
    ends = [
        jax.jit(rlfx.fuse_steps(env, 5, policy="random", backend=backend))(key, states) for backend in ("auto", "vmap")
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *ends)


CHECKS: dict[str, Callable[[], None]] = {
    "a program equals the reference, in value and gradient": check_reference,
    "a discounted sum equals a loop": check_numpy,
    "fused environment steps equal a scan": check_environments,
}


def self_test() -> Iterator[tuple[str, BaseException | None, float]]:
    """What is checked, what went wrong, and how long it took."""
    for what, check in CHECKS.items():
        begin, wrong = time.perf_counter(), None
        try:
            check()
        except Exception as error:  # a report says everything that is wrong
            wrong = error
        yield what, wrong, time.perf_counter() - begin


def main() -> int:
    """Print the report; 1 if the self-test failed."""
    for line in versions():
        print(line)
    print("extras:")
    for line in extras():
        print(f"  {line}")
    print("self-test:")
    failed = False
    for what, wrong, seconds in self_test():
        print(f"  {'FAILED' if wrong else 'ok':<6} {what} ({seconds:.1f} s)")
        if wrong:
            failed = True
            print(f"         {type(wrong).__name__}: {wrong}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
