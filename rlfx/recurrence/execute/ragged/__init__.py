"""Operations on slices whose length depends on t, lowered to masked operations on arrays of fixed length."""

from rlfx.recurrence.execute.ragged.evaluate import evaluate_ragged

__all__ = ["evaluate_ragged"]
