"""Pictures of states, and animations of policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx._checks import KEY, PATH, POSITIVE, Kind, expect, function, installed, number, optional
from rlfx.envs.base import Environment, checked_environment
from rlfx.envs.evaluation import acting
from rlfx.envs.spaces import is_space, sample
from rlfx.errors import EnvError, located

_FPS = number(above=0)


def _pictures(value: Any) -> list[np.ndarray]:
    frames = [np.asarray(frame) for frame in value]
    if not frames or any(f.dtype != np.uint8 or f.ndim != 3 or f.shape[2] != 3 or not f.size for f in frames):
        raise TypeError
    return frames


def _pictured(value: Any) -> Any:
    if Path(PATH.take(value)).suffix not in (".gif", ".png", ".webp"):
        raise ValueError
    return value


_PICTURE = Kind("a path that ends in .gif, .png or .webp", '"episode.gif"', _pictured)
_FRAMES = Kind("pictures, uint8[H, W, 3]", "[render(env, state)]", _pictures)


def render(env: Environment, state: Any, *, size: int = 240) -> np.ndarray:
    """A picture of one environment's state; ``uint8[size, size, 3]``.

    The classic control tasks are drawn from their state (rlfx's or gymnax's, under any wrappers), grids and images from
    the observation, anything else as a bar chart of the observation.

    Raises:
      EnvError: no environment or no size, or matplotlib is not installed.

    Example:
      >>> from rlfx.envs import make
      >>> env = make("CartPole-v1")
      >>> render(env, env.reset(jax.random.key(0)), size=64).shape
      (64, 64, 3)
    """
    checked_environment("render", env)
    size = expect("size", size, POSITIVE, EnvError, of="render")
    installed("render", "matplotlib", "plots", EnvError)
    spaces = jax.tree.leaves(env.observation_space, is_leaf=is_space)
    for seen, one in zip(jax.tree.leaves(jax.eval_shape(env.observe, state)), spaces, strict=True):
        if seen.shape != one.shape:
            fact = f"render: the observation of this state has shape {seen.shape}, that of one environment {one.shape}."
            raise EnvError(located(fact, fix="Give the state of one: jax.tree.map(lambda x: x[0], states)."))
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1, 1), dpi=size)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.axis("off")
    values, draw = _drawing(state)
    if draw is None:
        _draw_observation(axes, np.asarray(jax.tree.leaves(env.observe(state))[0]))
    else:
        draw(axes, values)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def save_gif(
    env: Environment,
    path: str | Path,
    key: jax.Array,
    *,
    policy: Callable[..., Any] | None = None,
    params: Any = None,
    memory: Any = None,
    steps: int = 200,
    fps: int = 30,
    size: int = 240,
) -> Path:
    """Run a policy for ``steps`` steps and save an animated GIF; a path that ends in ``.png`` gets the last picture.

    Args:
      env: an environment.
      path: where to save; it ends in ``.gif``, ``.webp`` or ``.png``. Its folder is made.
      key: a typed key.
      policy: as :func:`evaluate` takes it: ``policy(params, obs, key) -> action``, or with ``memory``
        ``policy(params, memory, obs, key) -> (action, memory)``; None acts at random.
      params: what the policy takes.
      memory: what a recurrent policy begins with. It goes through the ends of episodes.
      steps: how many steps, and pictures.
      fps: pictures a second.
      size: height and width, pixels.

    Raises:
      EnvError: an argument is not of its kind, ``policy`` returned something else than an action (and memory like
        ``memory``), or matplotlib or pillow is not installed.

    Example:
      >>> import tempfile
      >>> from rlfx.envs import make
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = save_gif(make("Catch-bsuite"), f"{folder}/a.gif", jax.random.key(0), steps=3, size=32)
      ...     path.stat().st_size > 0
      True
    """
    checked_environment("save_gif", env)
    expect("path", path, _PICTURE, EnvError, of="save_gif")
    expect("key", key, KEY, EnvError, of="save_gif")
    takes = ("params", "obs", "key") if memory is None else ("params", "memory", "obs", "key")
    expect("policy", policy, optional(function(*takes)), EnvError, of="save_gif")
    steps, size = (expect(k, v, POSITIVE, EnvError, of="save_gif") for k, v in (("steps", steps), ("size", size)))
    fps = expect("fps", fps, _FPS, EnvError, of="save_gif")
    installed("save_gif", "PIL", "plots", EnvError)
    _folder_made("save_gif", path)
    if policy is None:
        policy, memory = (lambda params, obs, key: sample(env.action_space, key)), None
    states = _played(env, key, acting("save_gif", policy, params), memory, steps)
    frames = [render(env, jax.tree.map(lambda x, t=t: x[t], states), size=size) for t in range(steps)]
    return save_frames(frames, path, fps=fps)


def _folder_made(user: str, path: str | Path) -> None:
    """Make the folder of a file, before the work that it is for."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fact = f"{user}: the folder of {path} can't be made: {error}."
        raise EnvError(located(fact, where=J.here(), fix="Give a path in a folder that can be written.")) from error


def _played(env: Environment, key: jax.Array, act: Callable[..., Any], memory: Any, steps: int) -> Any:
    """The states that a policy leads through, leaves ``[steps, ...]``."""

    def body(carry, key):
        state, memory = carry
        key_action, key_step = jax.random.split(key)
        action, memory = act(memory, env.observe(state), key_action)
        state, _ = env.step(key_step, state, action)
        return (state, memory), state

    first, keys = jax.random.split(key)
    begin = jax.tree.map(jnp.asarray, memory)
    return jax.lax.scan(body, (env.reset(first), begin), jax.random.split(keys, steps))[1]


def save_frames(frames: Sequence[np.ndarray], path: str | Path, *, fps: int = 30) -> Path:
    """Pictures ``uint8[H, W, 3]`` as an animated GIF, or the last one as a PNG.

    Raises:
      EnvError: an argument is not of its kind, the folder can't be made, or pillow is not installed.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = save_frames([np.zeros((8, 8, 3), np.uint8)] * 2, f"{folder}/a.gif")
      ...     path.name
      'a.gif'
    """
    frames = expect("frames", frames, _FRAMES, EnvError, of="save_frames")
    expect("path", path, _PICTURE, EnvError, of="save_frames")
    fps = expect("fps", fps, _FPS, EnvError, of="save_frames")
    installed("save_frames", "PIL", "plots", EnvError)
    _folder_made("save_frames", path)
    from PIL import Image

    path, images = Path(path), [Image.fromarray(f) for f in frames]
    if path.suffix == ".png":
        images[-1].save(path)
    else:
        images[0].save(path, save_all=True, append_images=images[1:], duration=round(1000 / fps), loop=0)
    return path


def _drawing(state: Any) -> tuple[Any, Callable[..., Any] | None]:
    """The innermost state with a drawing, by its fields."""
    while dataclasses.is_dataclass(state):
        fields = {f.name for f in dataclasses.fields(state)}
        for needed, draw in _DRAWINGS:
            if needed <= fields:
                return state, draw
        inner = next((getattr(state, f) for f in ("inner", "cartpole") if f in fields), None)
        if inner is None:
            break
        state = inner
    return state, None


def _draw_cartpole(axes: Any, s: Any) -> None:
    x, theta = float(s.x), float(s.theta)
    axes.set(xlim=(-2.6, 2.6), ylim=(-1.6, 3.6))
    axes.plot([-2.4, 2.4], [0, 0], color="0.6", linewidth=1)
    axes.plot([x - 0.4, x + 0.4], [0.15, 0.15], color="0.2", linewidth=6, solid_capstyle="butt")
    axes.plot([x, x + 2 * np.sin(theta)], [0.3, 0.3 + 2 * np.cos(theta)], color="tab:orange", linewidth=3)


def _draw_pendulum(axes: Any, s: Any) -> None:
    theta = float(s.theta)
    axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3))
    axes.plot([0, -np.sin(theta)], [0, np.cos(theta)], color="tab:red", linewidth=5, solid_capstyle="round")
    axes.plot(0, 0, "o", color="0.2")


def _draw_acrobot(axes: Any, s: Any) -> None:
    first, second = float(s.joint_angle1), float(s.joint_angle2)
    elbow = np.array([np.sin(first), -np.cos(first)])
    tip = elbow + [np.sin(first + second), -np.cos(first + second)]
    axes.set(xlim=(-2.3, 2.3), ylim=(-2.3, 2.3))
    axes.plot([-2.2, 2.2], [1, 1], color="0.6", linewidth=1)
    axes.plot(*np.stack([np.zeros(2), elbow, tip]).T, "o-", color="tab:blue", linewidth=3, markersize=3)


def _draw_mountain_car(axes: Any, s: Any) -> None:
    x = np.linspace(-1.2, 0.6, 100)
    axes.set(xlim=(-1.25, 0.65), ylim=(-0.1, 1.3))
    axes.plot(x, np.sin(3 * x) * 0.45 + 0.55, color="0.5", linewidth=1)
    axes.plot(0.5, np.sin(1.5) * 0.45 + 0.6, "^", color="tab:green")
    axes.plot(float(s.position), np.sin(3 * float(s.position)) * 0.45 + 0.58, "o", color="tab:blue")


_DRAWINGS = (
    ({"x", "theta", "theta_dot"}, _draw_cartpole),
    ({"theta", "theta_dot"}, _draw_pendulum),
    ({"joint_angle1", "joint_angle2"}, _draw_acrobot),
    ({"position", "velocity"}, _draw_mountain_car),
)


def _draw_observation(axes: Any, obs: np.ndarray) -> None:
    if obs.ndim == 3:  # channels become colours, the brightest on top
        axes.imshow((obs * np.arange(1, obs.shape[-1] + 1)).max(axis=-1), cmap="viridis", interpolation="nearest")
    elif obs.ndim == 2:
        axes.imshow(obs, cmap="viridis", interpolation="nearest")
    else:
        axes.bar(range(obs.size), obs.reshape(-1))
