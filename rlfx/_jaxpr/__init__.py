"""The only package that imports private jax: jaxprs, primitives, symbolic dimensions, source lines.

Everything the library needs from ``jax.extend`` and ``jax._src`` has a name here, so that a change in jax is met in one
place (``from rlfx import _jaxpr as J``). Tested on the oldest and the newest supported jax.
"""

# ruff: noqa: F401 - the names that other modules use
from jax._src import source_info_util
from jax._src.interpreters import partial_eval, pxla
from jax._src.random import prng
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var, primitives
from jax.extend.random import define_prng_impl

from rlfx._jaxpr.batched import alike
from rlfx._jaxpr.context import (
    ShapedArray,
    Tracer,
    UnexpectedTracerError,
    axis_size,
    current_trace,
    make_jaxpr,
    named_axes,
    surroundings,
    trace_of,
    tracing,
    weakly,
)
from rlfx._jaxpr.cores import core_devices, devices_like, moved
from rlfx._jaxpr.deferred import DEFERRED, deferred
from rlfx._jaxpr.derivatives import backward_of, closure_count, has_own_derivative, varies_with, with_own_cotangents
from rlfx._jaxpr.device import backend_has_started, computed_once, has_one_device, platform, stays_a_call
from rlfx._jaxpr.dims import (
    DIM_AS_VALUE,
    InconclusiveDimension,
    equal_dims,
    evaluate_dim,
    evaluate_dims,
    is_symbolic,
    maximum_dim,
    mentions_end,
    minimum_dim,
    symbolic_axes,
    time_dims,
)
from rlfx._jaxpr.elementwise import define_slopes, elementwise_like, of_jax
from rlfx._jaxpr.host import HOST_EFFECT, host_call
from rlfx._jaxpr.jaxprs import (
    body_of,
    call_body,
    close_with,
    closed,
    is_literal,
    jaxpr_as_fun,
    lift_consts,
    needed,
    scan_counts,
    sub_jaxprs,
    variables,
    without_dead_code,
)
from rlfx._jaxpr.keys import (
    RANDOM_UNWRAP,
    RANDOM_WRAP,
    drawn_together,
    draws_together,
    is_key,
    keys_of,
    random_by_loop,
    zero_keys,
)
from rlfx._jaxpr.kinds import (
    ADD_ANY,
    ARITHMETIC,
    CALLBACKS,
    COND,
    CUSTOM_JVP,
    CUSTOM_VJP,
    DRAWS,
    ELEMENTWISE,
    INLINED,
    LAYOUTS,
    OPTIMIZATION_BARRIER,
    RANDOM,
    REMAT,
    SCAN,
    SHARD_MAP,
    SPLIT,
    STACKING,
    STOP_GRADIENT,
    WHILE,
    is_call,
    is_inexact,
    primitive,
    short_dtype,
)
from rlfx._jaxpr.linear import bilinear, linear_pair
from rlfx._jaxpr.manual import unchecked, varying, varying_axes
from rlfx._jaxpr.profiler import stop_trace, waits
from rlfx._jaxpr.rows import of_rows
from rlfx._jaxpr.rules import (
    bind,
    bind_again,
    bind_params,
    define_batching,
    define_jvp,
    evaluate_again,
    is_zero_tangent,
    new_primitive,
    types_of,
    zero_tangent_like,
)
from rlfx._jaxpr.source import (
    Source,
    expression_in_traceback,
    function_source,
    here,
    leaked_from,
    made_at,
    scope_of,
    short_source,
    source_in_traceback,
    source_of,
)
from rlfx._jaxpr.staged import NO_STRUCTURED_RESIDUALS, Staged, linearizes, linearizes_staged, mapped
from rlfx._jaxpr.threefry import rounds as threefry_rounds
from rlfx._jaxpr.threefry import threefry_block
from rlfx._jaxpr.walk import contains, equations_in, is_named_call, walk
