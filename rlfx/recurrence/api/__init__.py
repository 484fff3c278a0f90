"""The public functions of the compiler, and what they tell about it."""
