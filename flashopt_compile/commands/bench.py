"""`flashopt bench`: the benchmarks, which are in the repository but not in the package."""

import argparse
import importlib
from types import ModuleType


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _benchmarks().add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    _benchmarks().run(options)
    return 0


def _benchmarks() -> ModuleType:
    try:
        return importlib.import_module("bench.__main__")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the module {error.name} was not found; the benchmarks run in a clone of the repository, "
            "after pip install -e '.[bench]'."
        ) from error
