"""Record what the plugins answer, for tests that have none of them: python -m tests.ahead.record [CASE ...]."""

import gzip
import json
import re
import sys
from pathlib import Path

import rlfx
from rlfx.ahead import process
from tests.ahead import programs

FOLDER = Path(__file__).with_name("recorded")

#: By name: what makes ``(fn, shapes)`` of a mesh of the machine's devices, and the machines.
CASES = {
    "loops": (lambda mesh: (programs.loops, programs.LOOPS), ("h200", "t4", "v5e")),
    "open_ended": (lambda mesh: (programs.open_ended, programs.OPEN_ENDED), ("h200", "v5e")),
    "hosted": (lambda mesh: (programs.hosted, programs.HOSTED), ("a100", "v5e")),
    "split": (lambda mesh: (programs.split(mesh), (programs.split_shape(mesh),)), ("h200:8", "v5e:4x4")),
    "one_epoch": (lambda mesh: programs.ppo_gradient(programs.BATCH, mesh), ("h200:8", "h200:2x8", "v5e:4x4")),
    "minibatches": (lambda mesh: programs.ppo_minibatches(programs.BATCH, mesh), ("h200:8", "h200:2x8", "v5e:4x4")),
}


def slim(text: str) -> str:
    """Without what nothing is read from."""
    text = re.sub(r", metadata=\{[^{}]*\}", "", text)
    text = re.sub(r", (?:frontend_attributes|sharding)=\{(?:[^{}]|\{[^{}]*\})*\}", "", text)
    return "\n".join(
        line for line in text.splitlines() if not re.match(r"^(\d+ |FileNames|FunctionNames|FileLoc|StackFr)", line)
    )


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    run = process.run

    for case in sys.argv[1:] or CASES:
        make, targets = CASES[case]
        for name in targets:
            target = rlfx.target(name)
            fn, shapes = make(target.mesh("b"))

            def recorded(*arguments, path=FOLDER / f"{case}-{name.replace(':', '-')}.json.gz"):
                answer = run(*arguments)
                with gzip.GzipFile(path, "wb", mtime=0) as file:
                    file.write(json.dumps({**answer, "hlo": slim(answer["hlo"])}).encode())
                print(path.name, path.stat().st_size)
                return answer

            process.run = recorded
            print(target.compile(fn, *shapes), flush=True)


if __name__ == "__main__":
    main()
