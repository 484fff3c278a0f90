"""Sizes of blocks: divisors of a length, or what comes near one."""


def divisor_near(length: int, size: int) -> int:
    """The largest divisor of ``length`` up to ``size``, or ``size`` itself if that is less than half of it.

    A poor divisor (T prime) costs more in loop overhead than one ragged block does.
    """
    best = divisor_up_to(length, size)
    return best if 2 * best >= size else size


def divisor_up_to(n: int, at_most: int) -> int:
    """The largest divisor of ``n`` that is at most ``at_most``."""
    return max(d for d in divisors(n) if d <= at_most)


def divisors(n: int) -> list[int]:
    """The divisors of ``n``, ascending.

    Example:
      >>> divisors(12)
      [1, 2, 3, 4, 6, 12]
    """
    return [d for d in range(1, n + 1) if n % d == 0]
