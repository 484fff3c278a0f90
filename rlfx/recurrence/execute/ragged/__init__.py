"""Operations on slices whose length depends on t, lowered to masked operations on arrays of fixed length."""

from rlfx.recurrence.execute.ragged.evaluate import evaluate_ragged
from rlfx.recurrence.execute.ragged.reductions import extreme_of

__all__ = ["evaluate_ragged", "extreme_of"]
