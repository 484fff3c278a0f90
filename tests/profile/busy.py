"""What is said about shares of time, on a machine on which others run."""


def tries(check, folder, times=5):
    """Call `check(folder)` with new folders until it holds: once is enough to show what the profiler says of a program.

    For shares of time alone, which other programs on the machine change. What counts and what sums is checked each time
    by the caller outside of it.
    """
    for i in range(times - 1):
        try:
            return check(folder / str(i))
        except AssertionError:
            continue
    return check(folder / str(times - 1))
