"""``python -m rlfx.ahead cuda``: make the environment that compiles for a kind of machine."""

import argparse
from pathlib import Path

import jax

from rlfx.ahead.environment import folder, install


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rlfx.ahead", description=__doc__)
    parser.add_argument("plugin", choices=("cuda", "tpu"))
    parser.add_argument("--to", type=Path, help="the folder to make (default: where rlfx looks for it)")
    parser.add_argument(
        "--jax", default=jax.__version__, help="the version of jax (default: the one that is installed)"
    )
    parser.add_argument("--python", help="the Python of the environment (default: this one)")
    given = parser.parse_args()
    place = given.to or folder(given.plugin)
    install(given.plugin, given.jax, place.absolute(), **({"python": given.python} if given.python else {}))
    print(f"rlfx compiles for {given.plugin} in {place}")


if __name__ == "__main__":
    main()
