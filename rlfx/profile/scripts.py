"""Run a user's script in this process, as `python` would."""

from __future__ import annotations

import pathlib
import runpy
import signal
import sys
import traceback


def execute(script: pathlib.Path, arguments: list[str]) -> int:
    """Run a script as `__main__`; the status with which it would have ended. A traceback begins with its own lines."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
            frames = frames.tb_next
        traceback.print_exception(error.with_traceback(frames or error.__traceback__))
        return 1
    finally:
        sys.argv, sys.path[:] = argv, path
    return 0
