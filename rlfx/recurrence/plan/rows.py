"""How many rows a timestep multiplies its weights with. For too few, a block reads them and adds to their gradients in vain."""

from __future__ import annotations

import math

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.cost import PRODUCTS, bytes_of, flops_of
from rlfx.recurrence.analysis.storage import work_of
from rlfx.recurrence.cpu.convolution import CONVOLUTION
from rlfx.recurrence.ir.program import Equation, Program, Var
from rlfx.recurrence.schedule.learner import Learner

#: Rows of a product that a CPU computes about as fast as many.
ROWS = 64

#: Rows of a block, at least, that weights of layers are read for, and their gradients added to, where no core's cache holds them.
ROWS_OF_LAYERS = 16


def _flops(equation: Equation, program: Program, batch: int) -> float:
    """Operations at a timestep, of an iteration: a nested loop multiplies its weights in each, with as many rows."""
    trips = equation.params["length"] if equation.op is J.SCAN else 1
    return flops_of(equation, program.domain) * (batch if "b" in program.dims_of(equation.outputs[0]) else 1) / trips


def rows_of(learner: Learner, batch: int) -> float:
    """How many rows a timestep multiplies its weights with at a time, in the mean over them; infinite without weights.

    Weights that it multiplies several times (a model, unrolled) are read, and have gradients, as often. With convolutions, too:
    they have a row for each position, and activations that longer blocks move through a slower cache.
    """
    return math.inf if any(e.op is CONVOLUTION for e in learner.active) else mean_rows(learner, batch)


def rows_of_nested(learner: Learner, batch: int) -> float:
    """How many rows an iteration of the user's loops multiplies its weights with, in the mean over these.

    Infinite where what is in no such loop is as much work.
    """
    program = learner.program
    work = {e: work_of(e, program) for e in learner.region.equations if e in learner.active}
    loops = [e for e in work if e.op is J.SCAN]
    if 2 * sum(work[e] for e in loops) <= sum(work.values()):
        return math.inf
    fixed = (v for e in loops for v in e.inputs if isinstance(v, Var) and program.dims_of(v).isdisjoint("tb"))
    elements = sum(math.prod(v.shape) for v in fixed)
    flops = sum(_flops(e, program, batch) for e in loops)
    return flops / (2 * elements) if elements and flops else math.inf


def rows_of_layers(learner: Learner, batch: int, tile: int) -> float:
    """How many rows a timestep multiplies weights with that see few, in the mean; infinite if these and their gradients are near.

    Behind convolutions, whose weights have a row for each position: dense layers of a few environments.
    """
    program, inside, params = learner.program, frozenset(learner.region.in_loops), {*learner.program.params}
    held, elements, flops = 0, 0, 0.0
    for e in learner.region.equations:
        weights = [v for v in e.inputs if isinstance(v, Var) and v in params]
        if e.op in PRODUCTS and e in learner.active and e not in inside and weights:
            size, work = sum(math.prod(v.shape) for v in weights), _flops(e, program, batch)
            if work < ROWS_OF_LAYERS * 2 * size:
                held += sum(bytes_of(v, program.domain) for v in weights)
                elements, flops = elements + size, flops + work
    return flops / (2 * elements) if 2 * held > tile else math.inf


def mean_rows(learner: Learner, batch: int) -> float:
    """As :func:`rows_of`, with convolutions as they are: where most weights are not theirs, those decide."""
    program = learner.program
    params = set(program.params)
    read = [v for e in learner.active for v in e.inputs if isinstance(v, Var) and v in params]
    products = (e for e in learner.region.equations if e in learner.active and (e.op in PRODUCTS or e.op is J.SCAN))
    flops = sum(_flops(e, program, batch) for e in products)
    elements = sum(math.prod(v.shape) for v in read)
    return flops / (2 * elements) if elements and flops else math.inf
