"""Scopes: which operation an XLA instruction belongs to, read from the `op_name` that jax wrote into its metadata.

`jit(train)/while/body/transpose(jvp(rlfx.op:loss))/vmap(rlfx.op:policy)/dot_general` belongs to `loss/policy`:
the path holds jitted functions, the loops' structure, and scopes wrapped in the transformations they went through.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from rlfx.profile.annotate import OPERATION, PHASE, STAGE

# What jax itself puts on the path for control flow and calls; everything else is a scope that somebody named.
STRUCTURE = re.compile(
    r"while|body|cond|scan|branch_\d+_fun|closed_call|core_call|checkpoint|remat\d*|rematted_computation|pjit|"
    r"custom_jvp_call|custom_vjp_call|custom_vjp_call_jaxpr|custom_lin|shard_map|xla_pmap|pallas_call|run_state|for"
)
TRANSFORM = re.compile(r"(?:jvp|vmap|transpose|linearize|partial_eval|batch|mask)\((.*)\)", re.DOTALL)
#: Scopes of rlfx's own that say nothing to a user; `rlfx.env.step` does.
OURS = re.compile(r"rlfx\.(?!env\.)")
FUNCTION = re.compile(r"(?:jit|pjit|pmap|xla_computation)\((.*)\)", re.DOTALL)


class Scope(NamedTuple):
    """Where an instruction comes from: `phase` and `stage` may be empty, `path` holds operations, outermost first.

    What has no operation inside of a stage of a compiled program has the stage as its innermost one. `named` is False when
    the instruction carries no path at all: XLA made it, and it inherits from its neighbours.
    """

    phase: str = ""
    path: tuple[str, ...] = ()
    stage: str = ""
    named: bool = True


UNNAMED = Scope(named=False)


def components(path: str) -> list[str]:
    """Split at the slashes outside parentheses and unwrap transformations.

    Example:
      >>> components("jit(f)/transpose(jvp(a/b))/vmap()/while/body/tanh")
      ['jit(f)', 'a', 'b', 'while', 'body', 'tanh']
    """
    parts, depth, start = [], 0, 0
    for at, c in enumerate(path + "/"):
        depth += (c == "(") - (c == ")")
        if c == "/" and depth <= 0:
            parts.append(path[start:at])
            start = at + 1
    flat = []
    for part in parts:
        wrapped = TRANSFORM.fullmatch(part)
        flat.extend(components(wrapped[1]) if wrapped else [part] if part else [])
    return flat


def without_repeats(path: tuple[str, ...]) -> tuple[str, ...]:
    """Collapse restatements: under `remat` the backward pass names its enclosing scopes a second time.

    Example:
      >>> without_repeats(("loss", "policy", "loss", "policy", "dense"))
      ('loss', 'policy', 'dense')
    """
    done: list[str] = []
    at = 0
    while at < len(path):
        size = len(done)
        if size and path[at : at + size] == tuple(done):
            at += size
        elif done and path[at] == done[-1]:
            at += 1
        else:
            done.append(path[at])
            at += 1
    return tuple(done)


@functools.cache
def parse(op_name: str) -> Scope:
    """Read one `metadata.op_name`.

    Marked operations win; where a path has none, the plain named scopes on it count, so that programs annotated with
    `jax.named_scope` alone (and the modules of neural-network libraries) still have names. Outside and inside of a stage
    of a compiled program that holds for each part of the path alone.

    Example:
      >>> parse("jit(f)/rlfx.phase:update/rlfx.op:loss/Dense_0/dot_general")
      Scope(phase='update', path=('loss',), stage='', named=True)
      >>> parse("jit(f)/rlfx.stage/3 scan/policy/while/body/tanh").path, parse("x").named
      (('policy',), False)
      >>> parse("jit(f)/rlfx.op:update/rlfx.stage/3 scan/while/body/add").path
      ('update', '3 scan')
    """
    op_name = op_name.partition(";")[0]  # XLA joins the names of instructions that it merged
    if not FUNCTION.match(op_name) and "/" not in op_name:
        return UNNAMED
    marked, plain, phase, stage = [], [], "", ""
    outside: list[str] = []  # of the stage
    parts = components(op_name)[:-1]  # the last one is the primitive
    rest = iter(parts)
    private = False  # inside a jitted function of a library, whose scopes are its own business
    for at, part in enumerate(rest):
        private = private or (at > 0 and part.startswith(("jit(_", "pjit(_")))  # not of the program itself: def _train
        if part == STAGE:
            outside += marked or plain
            marked, plain, private, stage = [], [], False, next(rest, "")
        elif part.startswith(OPERATION):
            marked.append(part[len(OPERATION) :])
        elif part.startswith(PHASE):
            phase = part[len(PHASE) :]
        elif not (private or STRUCTURE.fullmatch(part) or FUNCTION.fullmatch(part) or OURS.match(part) or "<" in part):
            plain.append(part)
    inside = marked or plain or ([stage] if stage else [])
    return Scope(phase, without_repeats((*outside, *inside)), stage)


def join(host: tuple[str, ...], device: tuple[str, ...]) -> tuple[str, ...]:
    """The operation of an instruction launched inside `host`: an operation open on both sides counts once.

    Example:
      >>> join(("train",), ("loss",)), join(("train", "loss"), ("loss", "policy"))
      (('train', 'loss'), ('train', 'loss', 'policy'))
    """
    for size in range(min(len(host), len(device)), 0, -1):
        if host[-size:] == device[:size]:
            return host + device[size:]
    return host + device
