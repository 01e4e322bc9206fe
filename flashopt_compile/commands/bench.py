"""`flashopt bench`: run the benchmarks of a clone of the repository. The package does not have them."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="those of python -m bench, such as speed --quick")


def run(options: argparse.Namespace) -> int:
    if not (REPOSITORY / "bench" / "__main__.py").is_file():
        raise ImportError(
            "the benchmarks are not installed; they run in a clone of the repository, after pip install -e '.[bench]'."
        )
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, "-m", "bench", *options.arguments], env=environment, check=False).returncode
