"""`python -m rlfx.profile run|report|compare|attach|calibrate`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import sys
import threading
import types
from collections.abc import Iterator

import jax

from rlfx._checks import POSITIVE, expect, installed
from rlfx.errors import ProfileError, located
from rlfx.profile import outside
from rlfx.profile.scripts import execute

ONE_CALL = (
    "The script was inside one call of XLA all the time: what changes over the training does not show in it. Split the "
    "call into iterations and wrap one in rlfx.profile.sampled, or look at several windows (--start)."
)
COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser("python -m rlfx.profile", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a script under a capture and report")
    run.add_argument("--out", default="profile", help="directory for the trace (default: %(default)s)")
    run.add_argument(
        "--start",
        type=float,
        default=0.0,
        help="begin the capture after so many seconds (default: at jax's first trace)",
    )
    run.add_argument("--duration", type=float, help="end it after so many seconds (default: the first second of work "
                     "after a second without compilation; 0: when the script ends)")  # fmt: skip
    run.add_argument("--memory", type=int, default=2048, metavar="MB",
                     help="end it before it takes so much memory to write (default: %(default)s)")  # fmt: skip
    run.add_argument("--events", type=int, default=1_000_000, metavar="N",
                     help="end it at about so many events; an instruction of XLA has two (default: %(default)s)")  # fmt: skip
    run.add_argument("--steps", type=int, default=0, help="environment steps done in the capture")
    run.add_argument("--operation", action="append", default=[], metavar="NAME=MODULE:FUNCTION",
                     help="name the calls of a package's function; with () after it, those of what it returns")  # fmt: skip
    run.add_argument("--python-tracer", action="store_true", help="record every Python call (inflates Python 1.7-2x)")
    run.add_argument("script")
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    report = commands.add_parser("report", help="report on a captured directory")
    report.add_argument("directory")
    report.add_argument(
        "--depth",
        type=int,
        help="fold operations deeper than this (default: none in the text, what can be read in figures)",
    )
    printed = report.add_mutually_exclusive_group()
    printed.add_argument("--json", action="store_true", help="everything, as JSON")
    printed.add_argument(
        "--of", type=int, metavar="STEPS", help="also what so many environment steps would take in all"
    )
    report.add_argument("--html", metavar="FILE", help="write the table as HTML")
    report.add_argument("--perfetto", metavar="FILE", help="write the timeline for ui.perfetto.dev (.json or .json.gz)")
    report.add_argument(
        "--plot", metavar="DIRECTORY", help="write bars, timeline, transitions, memory, processes as PNG"
    )
    report.add_argument("--corrected", action="store_true", help="take out the cost of profiling (calibrate first)")
    compared = commands.add_parser("compare", help="compare captured directories: two, or many side by side")
    compared.add_argument("before", help="a directory; several with commas are repeated runs of one program")
    compared.add_argument("after", nargs="+", help="the same, of others: repeated runs have means with 95%% intervals")
    compared.add_argument(
        "--plot", metavar="FILE", help="write their bars side by side, of repeated runs with 95%% intervals"
    )
    attach = commands.add_parser(
        "attach", help="at which lines of Python a process is that runs already (needs py-spy)"
    )
    attach.add_argument("pid", type=int)
    attach.add_argument("--duration", type=float, default=5.0, help="seconds (default: %(default)s)")
    calibrate = commands.add_parser("calibrate", help="measure the cost of profiling on this machine, and store it")
    calibrate.add_argument("--rounds", type=int, default=15)
    calibrate.add_argument("--out", help="file (default: in the user's cache directory)")
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one command; errors of the profiler go to stderr, with status 1. `run` ends with the status of the script."""
    arguments = parser().parse_args(argv)
    try:
        status = COMMANDS[arguments.command](arguments) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head` has seen enough; what is left must not be written when Python ends either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ProfileError as error:
        print(f"rlfx.profile: {error}", file=sys.stderr)
        return 1


def run(arguments: argparse.Namespace) -> int:
    """Run a script as `__main__`, captured wholly or in a window, and print the report; returns the script's status."""
    script = pathlib.Path(arguments.script)
    if not script.is_file():
        raise ProfileError(
            located(f"The script {str(script)!r} does not exist.", fix="Give the path of a Python file.")
        )
    named = [outside.parse(text) for text in arguments.operation]
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {COMMAND_BUFFERS}".strip()

    from rlfx.profile.capture import capturing, check_writable
    from rlfx.profile.window import ALIKE, Window

    check_writable(arguments.out)
    thread = threading.get_ident()

    def captured():
        return capturing(arguments.out, arguments.steps, None, arguments.python_tracer, 2, thread)

    key = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, key)
    jax.config.update(key, True)
    try:
        limits = arguments.memory << 20, arguments.events
        with (
            outside.naming(named) as missing,
            Window(captured, arguments.start, arguments.duration, *limits) as window,
        ):
            status = execute(script, arguments.arguments)
    finally:
        jax.config.update(key, before)
    if window.refused:
        raise ProfileError(
            located(
                "The script captures itself, and a process has one capture at a time.",
                fix="Run it with `python` alone, and read its own directory with `python -m rlfx.profile report`.",
            )
        )
    part = window.part
    if part is None and status:
        print(f"rlfx.profile: the script failed before the capture began, with status {status}", file=sys.stderr)
        return status
    if part is None:
        early = f"ran for less than --start {arguments.start} seconds"
        never = early if arguments.start else "ran nothing of jax, and hardly anything but imports"
        fact = f"The script ended before the capture began: it {never}."
        fix = "Give a smaller --start; with one, a script without jax is captured, too."
        raise ProfileError(located(fact, fix=fix))
    said = [f"no call of {n.module}:{'.'.join(n.path)} was named: the script did not import it" for n in missing]
    if window.kept:
        said += [
            f"this is what the script repeated, {part.start:.1f} to {part.stop:.1f} s after its begin; what was before, "
            f"with what it compiled: python -m rlfx.profile report {window.first.session.folder}"
        ]
    if window.cut:
        cut = f"the capture ended {window.cut}, and the script went on"
        said += [f"{cut}; --start, --duration, --events and --memory choose others."]
    if arguments.duration is None and window.other.by > ALIKE:
        name, here, later = window.other
        said += [f"{name} had {later:.0%} of the later half of the script's time, and {here:.0%} of this window"]
    for line in said:
        print(f"rlfx.profile: {line}", file=sys.stderr)
    found = part.session.report()
    print(found)
    if found.one_call:
        print(f"\n{ONE_CALL}")
    return status


def report(arguments: argparse.Namespace) -> None:
    """Print a report, and write what was asked for."""
    from rlfx.profile import read
    from rlfx.profile.tables import extrapolated

    found = read(arguments.directory)
    if arguments.corrected:
        found = found.corrected()
    with _written():
        if arguments.html:
            pathlib.Path(arguments.html).write_text(found._repr_html_())
        if arguments.perfetto:
            from rlfx.profile.perfetto import save

            save(found, arguments.perfetto)
        if arguments.plot:
            _plots(found, pathlib.Path(arguments.plot), arguments.depth)
    print(json.dumps(found.as_dict()) if arguments.json else found.text(arguments.depth))
    if arguments.of is not None:
        print(f"\n{extrapolated(found, expect('--of', arguments.of, POSITIVE, ProfileError, of='report'))}")


@contextlib.contextmanager
def _written() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ProfileError(
            located(f"Cannot write {error.filename}: {error.strerror}.", fix="Name a file in a folder that exists.")
        ) from None


def _figures() -> types.ModuleType:
    """`rlfx.profile.plot`, for files."""
    from rlfx.profile import plot

    plot.pyplot().switch_backend("agg")
    return plot


def _plots(found, folder: pathlib.Path, depth: int | None) -> None:
    plot = _figures()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("bars", "timeline", "transitions", "memory", "process_tree"):
        folded = {} if name in ("memory", "process_tree") or not depth else {"depth": depth}
        getattr(plot, name)(found, **folded).figure.savefig(folder / f"{name}.png", dpi=150)


def compare(arguments: argparse.Namespace) -> None:
    """Print two runs and what changed, or many with their medians and ranges."""
    from rlfx.profile import read
    from rlfx.profile.compare import apart, repeated, several

    groups = {name: [read(one) for one in name.split(",") if one] for name in (arguments.before, *arguments.after)}
    for name in (name for name, runs in groups.items() if not runs):
        raise ProfileError(located(f"{name!r} names no directory.", fix="Give directories, repeated runs with commas: a1,a2."))
    reports = {name: runs[0] for name, runs in groups.items()}
    if any("," in name for name in groups):
        print(repeated(groups))
    elif len(arguments.after) == 1:
        print(reports[arguments.before].compare(reports[arguments.after[0]]))
    else:
        print(several(reports))
    if arguments.plot:
        with _written():
            _figures().bars(dict(zip(apart(groups), groups.values(), strict=True))).figure.savefig(arguments.plot, dpi=150)


def attach(arguments: argparse.Namespace) -> None:
    """Sample a process that runs already, and print its lines."""
    from rlfx.profile.attach import spy

    print(spy(arguments.pid, arguments.duration))


def calibrate(arguments: argparse.Namespace) -> None:
    """Measure and store the cost of profiling."""
    installed("calibrate", "optax", "profile", ProfileError)
    from rlfx.profile import calibration

    measured = calibration.calibrate(arguments.rounds)
    with _written():
        target = measured.save(arguments.out)
    print(f"{measured.machine}: ns an event, stored in {target}")
    for kind, ns in measured.costs.items():
        print(f"  {kind:<12}{ns:>12,.0f}")
    print(f"Off the critical path, {measured.contention:.0%} of it holds a program up.")
    print(f"They explain what profiling added to each of the programs measured within about {measured.spread:.0%}.")


COMMANDS = {"run": run, "report": report, "compare": compare, "attach": attach, "calibrate": calibrate}

if __name__ == "__main__":
    sys.exit(main())
