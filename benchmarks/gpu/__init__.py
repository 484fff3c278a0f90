"""What only an accelerator can show: numerics, kernels, memory, times. See ``__main__.py``."""
