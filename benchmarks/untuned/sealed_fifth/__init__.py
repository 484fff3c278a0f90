from . import unrolled
CASES = {}
TINY = {}
