"""python -m bench [speed|layouts|callers|release|formats] [--quick] [--out DIR]: all by default, as in `make bench`."""

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path

from bench import callers, formats, layouts, release, speed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        choices=("speed", "layouts", "callers", "release", "formats", "all"),
        default="all",
        help="(%(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="speed on small sizes in two rounds, as a smoke test")
    parser.add_argument("--out", type=Path, help="the folder for speed's figures and picture")


def run(options: argparse.Namespace) -> None:
    if options.what in ("speed", "all"):
        speed.main(options.quick, options.out)
    if options.what in ("layouts", "all"):
        layouts.main(options.quick)
    if options.what in ("callers", "all"):
        callers.main(options.quick)
    if options.what in ("release", "all"):
        release.main(options.quick)
    if options.what in ("formats", "all"):
        # Only `python -m bench.formats` exits with 1 on a missed goal.
        with contextlib.suppress(SystemExit):
            formats.main()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="The benchmarks behind the README's figures.")
    add_arguments(parser)
    run(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
