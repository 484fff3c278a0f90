"""How XLA compiles tests: quickly, or as it does for users. Imports no jax, which reads its flags once."""

from importlib.metadata import version

_EMITS = tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11)  # later versions have no choice

#: Options of the compiler without the passes that take long: about half the CPU time.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
    **({"xla_cpu_use_fusion_emitters": False} if _EMITS else {}),
}
#: The options that users have.
OPTIMISED = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    **({"xla_cpu_use_fusion_emitters": True} if _EMITS else {}),
}


def flags(options: dict) -> str:
    """Options as ``XLA_FLAGS``.

    Example:
      >>> flags({"xla_a": True, "xla_b": 1})
      '--xla_a=true --xla_b=1'
    """
    return " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())
