"""Record what the plugins answer, for tests that have none of them: python -m tests.ahead.record."""

import gzip
import json
import re
from pathlib import Path

import rlfx
from rlfx.ahead import process
from tests.ahead import programs

FOLDER = Path(__file__).with_name("recorded")

CASES = {
    "loops": (programs.loops, programs.LOOPS, ("h200", "t4", "v5e")),
    "open_ended": (programs.open_ended, programs.OPEN_ENDED, ("h200", "v5e")),
    "hosted": (programs.hosted, programs.HOSTED, ("a100", "v5e")),
    "split": (None, None, ("h200:8", "v5e:4x4")),
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

    for case, (fn, shapes, targets) in CASES.items():
        for name in targets:
            target = rlfx.target(name)
            mesh = target.mesh("b")
            made, given = (programs.split(mesh), (programs.split_shape(mesh),)) if fn is None else (fn, shapes)

            def recorded(*arguments, path=FOLDER / f"{case}-{name.replace(':', '-')}.json.gz"):
                answer = run(*arguments)
                with gzip.GzipFile(path, "wb", mtime=0) as file:
                    file.write(json.dumps({**answer, "hlo": slim(answer["hlo"])}).encode())
                print(path.name, path.stat().st_size)
                return answer

            process.run = recorded
            print(target.compile(made, *given))


if __name__ == "__main__":
    main()
