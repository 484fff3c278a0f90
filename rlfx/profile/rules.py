"""What each event of the host means: a table from the names that jax, PJRT and XLA give to their trace events."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from rlfx.profile.annotate import AGAIN, CAPTURE, OPERATION, PHASE

# Host states. `callback`: Python called back from inside a compiled program. `device`: this thread itself executes
# XLA kernels (the CPU backend runs small programs inline). `wait`: blocked until the device has finished. `blocked`:
# by others than the device: a queue, a lock, a pipe, a socket, another process, a sleep. `import`: of a package.
PYTHON, BACKEND, DISPATCH, COMPILE, TRANSFER, CALLBACK, DEVICE, WAIT, BLOCKED, IMPORT = [
    "python",
    "backend",
    "dispatch",
    "compile",
    "transfer",
    "callback",
    "device",
    "wait",
    "blocked",
    "import",
]
# Reading a result back: a wait while the device still executes, a transfer afterwards. Resolved by the sweep.
FETCH = "fetch"
WAITING = "rlfx.wait:"
BLOCKING = "rlfx.blocked:"
IMPORTING = "rlfx.import:"
TOGETHER = "rlfx.tasks:"  # a loop of asyncio waits: `//` between the operations of its tasks, `/` inside one
STATES = (PYTHON, BACKEND, DISPATCH, COMPILE, TRANSFER, CALLBACK, DEVICE, WAIT, BLOCKED, IMPORT)
BUSY, COPY, IDLE = "busy", "copy", "idle"


class Rule(NamedTuple):
    """`kind`: annotation, again, capture, state, inherit, record, region, stop, ignore, unknown; `value`: state or name."""

    kind: str
    value: str = ""


# First match wins. Everything a known event encloses without a rule of its own keeps the state around it.
RULES: tuple[tuple[str, Rule], ...] = (
    (r"end: .*", Rule("ignore")),
    (r"rlfx\.(blocked|tasks):.*", Rule("state", BLOCKED)),
    (r"rlfx\.import:.*", Rule("state", IMPORT)),
    (r"ThreadpoolListener::Record", Rule("record")),
    (r"ThreadpoolListener::StartRegion", Rule("region")),
    (r"ThreadpoolListener::StopRegion", Rule("stop")),
    (r"PjitFunction\(.*\)|PmapFunction\(.*\)|ExecuteReplicated.*|.*ParallelExecute.*", Rule("state", BACKEND)),
    (
        r"backend_compile.*|lower_sharding_computation|.*Client::Compile.*|.*::CompileAndLoad.*|trace_to_jaxpr.*"
        r"|jaxpr_to_mlir.*|.*XlaCompile.*|DeserializeExecutable.*|.*DeserializeLoadedExecutable.*|rlfx\.compile:.*"
        r"|compile_or_get_cached|.*::Lower.*",
        Rule("state", COMPILE),
    ),
    (
        r".*LoadedExecutable::Execute.*|cuLaunch.*|cuGraphLaunch.*|cudaLaunch.*|cuModule.*|cuFunc.*|.*::ExecuteAsync.*"
        r"|hipLaunch.*",
        Rule("state", DISPATCH),
    ),
    (
        r"rlfx\.wait:.*|.*::Await|.*::BlockUntilReady|.*block_until_ready.*|.*\(wait for completion\)"
        r"|cu(Stream|Event|Ctx)Synchronize.*|.*BlockHostUntilDone.*|.*::BlockHostUntilReady.*|hip(Stream|Event|Device)Synchronize.*",
        Rule("state", WAIT),
    ),
    (
        r"np\.asarray\(jax\.Array\)|.*ToLiteral.*|ValueOfBuffer.*|.*CopyRawToHost.*|.*TransferFromOutfeed.*",
        Rule("state", FETCH),
    ),
    (
        r".*copy_to_host_async.*|.*batched_copy_array_to_devices.*|(batched_)?device_put.*|BatchedDevicePut.*"
        r"|DevicePut.*|BatchedCopyToDevice.*|H2D.*|D2H.*|.*[Cc]opyToDevice.*|.*BufferFromHost.*"
        r"|.*TransferTo(Device|Infeed).*|cuMem(cpy|set).*|hipMem(cpy|set).*|.*CopyFromHost.*",
        Rule("state", TRANSFER),
    ),
    (r"\$.*", Rule("inherit")),  # frames of the Python tracer
    (
        r"ParseArguments|PythonRefManager::.*|shard_args|Wait for (donation|usage) holds|Handle input.*"
        r"|AllocateOutputBuffers.*|.*::CreateOutputs|.*::ExecutePrepare.*|ThunkExecutor::Execute|SlinkyThreadPool::.*"
        r"|.*ThreadPool.*|cu[A-Z].*|hip[A-Z].*|.*HashTableLookup.*|.*::GetDefaultLayout.*|RunInvariantCheckers"
        r"|.*::AllocateRawBuffer.*|TaskDispatcher::.*|.*KernelCache.*|Eigen.*|.*::Release.*|.*::Delete.*"
        r"|create_new_tracked_device_buffer.*|.*Donat.*|GpuExecutable::.*|.*Thunk.*::.*|Allocate.*|Memory(All|Deall)ocation|.*Callback::.*",
        Rule("inherit"),
    ),
)
_COMPILED = tuple((re.compile(pattern, re.DOTALL), rule) for pattern, rule in RULES)

# Threads and lines that do nothing but compile: the thread that asked for it is in state `compile` meanwhile.
COMPILER_THREADS = re.compile(r".*(compil|codegen|llvm|ptxas).*", re.IGNORECASE)
KNOWN_PLANES = re.compile(
    r"/host:CPU|/host:metadata|Task Environment|/device:.+:\d+|/host:CUPTI|/host:ROCTRACER|/host:python-tracer"
    r"|/host:__ScopeRangeCallStack__"
)
DEVICE_PLANE = re.compile(r"/device:.+:\d+.*")
# Lines of device planes that restate others: derived by trace viewers, or of another granularity.
DERIVED_LINES = re.compile(
    r"XLA Modules|XLA TraceMe|Steps|Framework (Ops|Name Scope)|TensorFlow (Ops|Name Scope)|Source code"
    r"|Async XLA Ops|Launch Stats"
)
DEVICE_LINES = re.compile(r"Stream #.*|XLA Ops|stream.*", re.IGNORECASE)
MEMCPY = re.compile(r"Mem(cpy|set).*|.*[Cc]opy[HDP]2[HDP].*")


@functools.lru_cache(maxsize=65536)
def rule(name: str) -> Rule:
    """The meaning of a host event.

    Example:
      >>> rule("PjitFunction(train)"), rule("rlfx.op:simulation"), rule("my own annotation").kind
      (Rule(kind='state', value='backend'), Rule(kind='annotation', value='rlfx.op:simulation'), 'unknown')
    """
    if name.startswith((OPERATION, PHASE)):
        return Rule("annotation", name)
    if name.startswith(AGAIN):
        return Rule("again", name[len(AGAIN) :])
    if name == CAPTURE:
        return Rule("capture")
    for pattern, found in _COMPILED:
        if pattern.fullmatch(name):
            return found
    return Rule("unknown", name)


def function_of(name: str) -> str:
    """`jit(f)` for the event of a call of a jitted `f` and for module `jit_f`; empty for anything else.

    Example:
      >>> function_of("PjitFunction(step)"), function_of("jit_step"), function_of("ParseArguments")
      ('jit(step)', 'jit(step)', '')
    """
    if name.startswith("PjitFunction(") and name.endswith(")"):
        return f"jit({re.sub(r'>', '', re.sub(r'<', '_', name[13:-1]))})"
    if name.startswith("jit_"):
        return f"jit({name[4:]})"
    return ""
