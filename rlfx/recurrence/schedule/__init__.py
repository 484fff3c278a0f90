"""Decisions: levels, the learner's cut, sections and blocks, plans as values."""
