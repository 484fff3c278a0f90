"""Programs that rlfx was not tuned on: as a user writes them, and by hand in several forms. See ``__main__.py``."""
