"""A writer of the trace format, small enough to see through: what a GPU would have recorded, without a GPU."""

import struct
import time
from dataclasses import dataclass, field

import pytest


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode(number: int, value) -> bytes:
    """One field: integers as varints, floats as doubles, text and bytes length-delimited, lists repeated."""
    if isinstance(value, list):
        return b"".join(encode(number, v) for v in value)
    if isinstance(value, bool | int):
        return _varint(number << 3) + _varint(int(value))
    if isinstance(value, float):
        return _varint(number << 3 | 1) + struct.pack("<d", value)
    raw = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(raw)) + raw


def message(**fields) -> bytes:
    """`message(f1=..., f2=...)`: the fields by number."""
    return b"".join(encode(int(name[1:]), value) for name, value in fields.items())


@dataclass
class Plane:
    """An XPlane under construction: `line(name)` then `event(line, name, start_us, duration_us, **stats)`."""

    name: str
    lines: dict[str, list[bytes]] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    stats: dict[str, int] = field(default_factory=dict)
    own: list[bytes] = field(default_factory=list)
    modules: list[bytes] = field(default_factory=list)

    def stat(self, name: str, value) -> bytes:
        key = self.stats.setdefault(name, len(self.stats) + 1)
        kind = 2 if isinstance(value, float) else 5 if isinstance(value, str) else 6 if isinstance(value, bytes) else 4
        return message(f1=key) + encode(kind, value)

    def event(self, line: str, name: str, start_us: float, duration_us: float, **stats) -> None:
        key = self.events.setdefault(name, len(self.events) + 1)
        body = message(f1=key, f2=round(start_us * 1e6), f3=round(duration_us * 1e6))
        body += b"".join(encode(4, self.stat(k, v)) for k, v in stats.items())
        self.lines.setdefault(line, []).append(body)

    def module(self, program: int, name: str, instructions: list[bytes]) -> None:
        """An HloProto with one computation, as an event metadata of /host:metadata."""
        hlo = message(f1=name, f5=program, f3=message(f1="main", f5=1, f2=instructions))
        proto = self.stat("Hlo Proto", message(f1=hlo))
        self.modules.append(message(f1=program, f2=message(f1=program, f2=f"{name}({program})", f5=proto)))

    def encode(self) -> bytes:
        lines = [
            message(f1=i, f2=name, f3=0) + encode(4, events) for i, (name, events) in enumerate(self.lines.items(), 1)
        ]
        metadata = [message(f1=k, f2=message(f1=k, f2=name)) for name, k in self.events.items()] + self.modules
        stats = [message(f1=k, f2=message(f1=k, f2=name)) for name, k in self.stats.items()]
        return message(f2=self.name, f3=lines, f4=metadata, f5=stats, f6=self.own)


def instruction(key: int, name: str, opcode: str, op_name: str = "", operands=(), dims=(8,), **more) -> bytes:
    """An HloInstructionProto; `op_name` as jax writes it, empty for one that XLA made."""
    shape = message(f3=list(dims))
    body = message(f1=name, f2=opcode, f3=shape, f35=key, f36=list(operands), **more)
    return body + (encode(7, message(f2=op_name)) if op_name else b"")


@dataclass
class Space:
    """An XSpace under construction."""

    planes: list[Plane] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    start_ns: int = 1_700_000_000_000_000_000

    def plane(self, name: str) -> Plane:
        self.planes.append(Plane(name))
        return self.planes[-1]

    def encode(self) -> bytes:
        task = Plane("Task Environment")
        task.own.append(task.stat("profile_start_time", self.start_ns))
        return message(f1=[p.encode() for p in [*self.planes, task]], f3=self.warnings)

    def write(self, directory, notes: str | None = None):
        folder = directory / "plugins" / "profile" / f"made-{time.time_ns()}"
        folder.mkdir(parents=True)
        path = folder / "host.xplane.pb"
        path.write_bytes(self.encode())
        if notes is not None:
            (folder / "rlfx.json").write_text(notes)
        return path


def gpu_space(k: int = 3) -> Space:
    """A loop of `k` iterations on one GPU: 100 us of Python, a launch, a 400 us kernel for `loss` that the host waits
    for, a 50 us copy of 4096 bytes, and another 450 us of Python: 1,000 us an iteration, in operation `update`."""
    space = Space()
    metadata = space.plane("/host:metadata")
    metadata.module(
        7,
        "jit_train",
        [
            instruction(1, "fusion.1", "fusion", "jit(train)/rlfx.op:loss/dot_general"),
            instruction(2, "copy.2", "copy", operands=[1]),
        ],
    )
    host, gpu = space.plane("/host:CPU"), space.plane("/device:GPU:0")
    host.event("python", "rlfx.capture", 0, 1000 * k)
    for i in range(k):
        t = 1000 * i
        host.event("python", "rlfx.op:update", t, 1000)
        host.event("python", "PjitFunction(train)", t + 100, 20)
        host.event("python", "PjRtStreamExecutorLoadedExecutable::Execute", t + 105, 14)
        host.event("python", "cuLaunchKernel", t + 110, 4, correlation_id=2 * i)
        host.event("python", "cuLaunchKernel", t + 114, 4, correlation_id=2 * i + 1)
        host.event("python", "cuStreamSynchronize", t + 120, 380)
        host.event("python", "np.asarray(jax.Array)", t + 500, 50)
        run = {"hlo_module": "jit_train", "program_id": 7, "run_id": i}
        gpu.event("Stream #13(Compute)", "fusion_1", t + 115, 375, hlo_op="fusion.1", correlation_id=2 * i, **run)
        gpu.event("Stream #13(Compute)", "copy_2", t + 490, 10, hlo_op="copy.2", correlation_id=2 * i + 1, **run)
        details = "kind:d2h size:4096 dest:0 async:1"
        gpu.event("Stream #14(MemcpyD2H)", "MemcpyD2H", t + 500, 50, correlation_id=100 + i, memcpy_details=details)
    gpu.event("XLA Modules", "jit_train(7)", 0, 1000)
    return space


@pytest.fixture
def made():
    """`Space`, `gpu_space`, `instruction` and `message`, for tests that build traces."""
    import types

    return types.SimpleNamespace(Space=Space, gpu_space=gpu_space, instruction=instruction, message=message)
