"""rlfx: composable RL transforms for JAX."""
