"""Programs compiled ahead of time, for machines that are not here: what they take there, by that machine's own compiler."""
