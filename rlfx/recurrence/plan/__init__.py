"""Which plan: what is legal, what it costs, what fits a number of bytes."""
