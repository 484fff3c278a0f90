"""A pytest plugin that notes which lines of the compiler each test runs, and how long it takes.

``RLFX_REACH=FILE python -m pytest -p tests.mutation.reach tests/recurrence`` appends one JSON object a test to FILE. Of
each test function at most two cases are run: the first and one between.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
INSIDE = str(ROOT / "rlfx" / "recurrence") + os.sep
CALLS = 100


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.split("[")[0]].append(item)
    kept = {id(few[i]) for few in cases.values() for i in {0, len(few) // 2}}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    lines: dict[str, set[int]] = defaultdict(set)
    calls: Counter[CodeType] = Counter()

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(INSIDE):
            return None
        calls[frame.f_code] += 1
        if calls[frame.f_code] > CALLS:
            return None
        mine = lines[frame.f_code.co_filename]

        def note(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "line":
                mine.add(frame.f_lineno)
            return note

        return note

    before, failed, began = sys.gettrace(), item.session.testsfailed, time.process_time()
    sys.settrace(enter)
    try:
        return (yield)
    finally:
        sys.settrace(before)
        row: dict[str, Any] = {"test": item.nodeid, "seconds": round(time.process_time() - began, 2)}
        row["passed"] = item.session.testsfailed == failed
        row["lines"] = {str(Path(f).relative_to(ROOT)): sorted(found) for f, found in sorted(lines.items())}
        with Path(os.environ["RLFX_REACH"]).open("a") as file:
            file.write(json.dumps(row) + "\n")
