"""`python -m rlfx.profile run|report|compare|calibrate`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import runpy
import signal
import sys

from rlfx.errors import ProfileError, RlfxError

COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser("python -m rlfx.profile", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a script under a capture and report")
    run.add_argument("--out", default="profile", help="directory for the trace (default: %(default)s)")
    run.add_argument("--start", type=float, default=0.0, help="begin the capture after so many seconds")
    run.add_argument("--duration", type=float, help="end it after so many seconds (default: at the script's end)")
    run.add_argument("--steps", type=int, default=0, help="environment steps done in the capture")
    run.add_argument("--python-tracer", action="store_true", help="record every Python call (inflates Python 1.7-2x)")
    run.add_argument("script")
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    report = commands.add_parser("report", help="report on a captured directory")
    report.add_argument("directory")
    report.add_argument("--depth", type=int, help="fold operations deeper than this")
    report.add_argument("--json", action="store_true", help="everything, as JSON")
    report.add_argument("--html", metavar="FILE", help="write the table as HTML")
    report.add_argument("--perfetto", metavar="FILE", help="write the timeline for ui.perfetto.dev (.json or .json.gz)")
    report.add_argument("--plot", metavar="DIRECTORY", help="write bars, timeline, transitions, processes as PNG")
    report.add_argument("--corrected", action="store_true", help="take out the cost of profiling (calibrate first)")
    compared = commands.add_parser("compare", help="compare two captured directories")
    compared.add_argument("before")
    compared.add_argument("after")
    calibrate = commands.add_parser("calibrate", help="measure the cost of profiling on this machine, and store it")
    calibrate.add_argument("--rounds", type=int, default=7)
    calibrate.add_argument("--out", help="file (default: in the user's cache directory)")
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one command; errors of rlfx go to stderr, with status 1."""
    arguments = parser().parse_args(argv)
    try:
        COMMANDS[arguments.command](arguments)
    except RlfxError as error:
        print(f"rlfx.profile: {error}", file=sys.stderr)
        return 1
    return 0


def run(arguments: argparse.Namespace) -> None:
    """Run a script as `__main__`, captured wholly or in a window, and print the report."""
    script = pathlib.Path(arguments.script)
    if not script.exists():
        raise ProfileError(f"The script {str(script)!r} does not exist.")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {COMMAND_BUFFERS}".strip()
    import jax

    from rlfx.profile import capture, read

    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)

    def captured():
        return capture(arguments.out, steps=arguments.steps, python_tracer=arguments.python_tracer)

    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments.arguments]
    sys.path.insert(0, str(script.resolve().parent))
    whole = not arguments.start and arguments.duration is None
    window = captured() if whole else _window(captured, arguments.start, arguments.duration)
    try:
        with window, contextlib.suppress(SystemExit):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path
    print(read(arguments.out))


@contextlib.contextmanager
def _window(captured, start: float, duration: float | None):
    """Begin and end the capture by an alarm: its handler runs on the main thread, between two of its instructions."""
    stack = contextlib.ExitStack()
    begun = False

    def ring(number, frame) -> None:
        nonlocal begun
        if begun:
            stack.close()
            return
        begun = True
        stack.enter_context(captured())
        if duration is not None:
            signal.setitimer(signal.ITIMER_REAL, duration)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(start, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        stack.close()
    if not begun:
        raise ProfileError(f"The script ended before the capture began: it ran for less than --start {start} seconds.")


def report(arguments: argparse.Namespace) -> None:
    """Print a report, and write what was asked for."""
    from rlfx.profile import read

    found = read(arguments.directory)
    if arguments.corrected:
        found = found.corrected()
    if arguments.html:
        pathlib.Path(arguments.html).write_text(found._repr_html_())
    if arguments.perfetto:
        from rlfx.profile.perfetto import save

        save(found, arguments.perfetto)
    if arguments.plot:
        _plots(found, pathlib.Path(arguments.plot))
    print(json.dumps(found.as_dict()) if arguments.json else found.text(arguments.depth))


def _plots(found, folder: pathlib.Path) -> None:
    import matplotlib

    from rlfx.profile import plot

    matplotlib.use("agg")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("bars", "timeline", "transitions", "process_tree"):
        getattr(plot, name)(found).figure.savefig(folder / f"{name}.png", dpi=120)


def compare(arguments: argparse.Namespace) -> None:
    """Print two runs side by side."""
    from rlfx.profile import read

    print(read(arguments.before).compare(read(arguments.after)))


def calibrate(arguments: argparse.Namespace) -> None:
    """Measure and store the cost of profiling."""
    from rlfx.profile import calibration

    measured = calibration.calibrate(arguments.rounds)
    target = measured.save(arguments.out)
    print(f"{measured.machine}: ns an event, stored in {target}")
    for kind, ns in measured.costs.items():
        print(f"  {kind:<12}{ns:>12,.0f}")


COMMANDS = {"run": run, "report": report, "compare": compare, "calibrate": calibrate}

if __name__ == "__main__":
    sys.exit(main())
