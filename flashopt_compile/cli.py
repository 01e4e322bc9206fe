"""The command `flashopt`: finds the subcommand's module, loads only that one, and says what went wrong in a line."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

import torch

from flashopt_compile.checkpoint.states import library_version

COMMANDS = {
    "plan": "what training a model takes on each device, beside other optimizers, before anything is allocated",
    "kernels": "the GPU kernels of a step, written and compiled without a GPU",
    "bench": "the speed of a step beside torch and other libraries",
    "inspect": "what a checkpoint holds: parts and their bytes, versions, and the health of its numbers",
    "convert": "a checkpoint as one of torch.optim, flashopt, FlashOptim or safetensors",
    "verify": "whether two checkpoints are bit-identical and, if not, the worst difference of each tensor",
}


def module(command: str) -> ModuleType:
    return importlib.import_module(f"flashopt_compile.commands.{command}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `flashopt COMMAND ...`; 0 if all went well, 1 for what the command found wrong, 2 for wrong input."""
    parser = argparse.ArgumentParser(prog="flashopt", description="Optimizers on 7 bytes per parameter.")
    version = f"flashopt-compile {library_version()} (torch {torch.__version__})"
    parser.add_argument("--version", action="version", version=version, help="print the versions of library and torch")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    name = next((argument for argument in arguments if argument in COMMANDS), "")
    try:
        for each, summary in COMMANDS.items():
            command = commands.add_parser(each, help=summary, description=summary[0].upper() + summary[1:] + ".")
            if each == name:
                module(each).add_arguments(command)
        options = parser.parse_args(arguments)
        code = module(options.command).run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to flush on exit
        return 0
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"flashopt {name}: {error}", file=sys.stderr)
        return 2
