"""Operations on slices whose length depends on t, lowered to masked operations on arrays of fixed length."""

from rlfx.recurrence.ragged.evaluate import evaluate_ragged
from rlfx.recurrence.ragged.part import may_be_empty, widest
from rlfx.recurrence.ragged.reductions import extreme_of

__all__ = ["evaluate_ragged", "extreme_of", "may_be_empty", "widest"]
