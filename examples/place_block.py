"""Place a Llama attention block on four devices, run it, and look at what was decided.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/place_block.py

On a machine with several GPUs, drop XLA_FLAGS and ``hardware=``: rates are then measured.
"""

import jax
import jax.numpy as jnp

from rlfx.place import assign, hardware, workloads

work = workloads.llama_block(tokens=256, width=256, heads=8)
args = work.arguments(jax.random.key(0))

# Four equal devices whose links are slow compared with their arithmetic.
machine = hardware.uniform(4, flops=1e11, memory_rate=2e10, memory=1e9, bandwidth=1e9)

placed = assign(
    work.fn,
    *args,
    devices=jax.devices()[:4],
    method="doppler",
    budget=2048,
    splits=work.splits,
    fuse=work.fuse,
    hardware=machine,
)
print(placed.explain())

difference = jnp.max(jnp.abs(placed(*args) - work.fn(*args)))
print(f"largest difference from the unplaced function: {difference:.1e}")

placed.save("place_block.json")
placed.plot().savefig("place_block.png", dpi=150)
print("wrote place_block.json and place_block.png")
