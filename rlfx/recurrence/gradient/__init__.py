"""A program with its derivative: the rule, and the forms in which a gradient is computed."""
