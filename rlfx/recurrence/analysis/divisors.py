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


def divisor_about(length: int, size: int) -> int:
    """The divisor of ``length`` nearest to ``size`` among those above 1 and up to twice it; ``size`` itself if there is none.

    Example:
      >>> [divisor_about(length, 4) for length in (64, 250, 9, 11)]
      [4, 5, 3, 4]
    """
    near = [d for d in divisors(length) if 1 < d <= 2 * size]
    return min(near, key=lambda d: abs(d - size), default=size)


def divisors(n: int) -> list[int]:
    """The divisors of ``n``, ascending.

    Example:
      >>> divisors(12)
      [1, 2, 3, 4, 6, 12]
    """
    return [d for d in range(1, n + 1) if n % d == 0]
