"""What users write: indices, the domain, time, series, reductions, and the library written in them."""
