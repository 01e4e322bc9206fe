"""Find a model's weights beside an optimizer's file, as Hugging Face's Trainer and Accelerate write them."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin")
WEIGHT_FILES = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")
INDEX_FILES = tuple(f"{name}.index.json" for name in WEIGHT_FILES)


def optimizer_file(path: Path) -> Path:
    """The file to read: the optimizer's if `path` is a folder."""
    if not path.is_dir():
        return path
    found = next((path / name for name in OPTIMIZER_FILES if (path / name).is_file()), None)
    if found is None:
        raise ValueError(f"{path} is a folder without {' or '.join(OPTIMIZER_FILES)}; name a checkpoint's file.")
    return found


def weight_files(optimizer: Path) -> list[Path]:
    """The files with the weights beside an optimizer's file."""
    for name in WEIGHT_FILES:
        if (optimizer.parent / name).is_file():
            return [optimizer.parent / name]
    for name in INDEX_FILES:
        index = optimizer.parent / name
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values()
            return [optimizer.parent / each for each in dict.fromkeys(names)]
    allowed = ", ".join(WEIGHT_FILES)
    raise ValueError(f"{optimizer} has no model, and beside it is none of {allowed}.")


def read_safetensors(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file."""
    try:
        return safetensors().load_file(path)
    except Exception as error:
        if isinstance(error, ImportError | OSError):
            raise
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())[:120]}") from None


def safetensors() -> ModuleType:
    """The module safetensors.torch; ImportError with what to install."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("safetensors is not installed: pip install 'flashopt-compile[checkpoint]'.") from error
    return safetensors.torch
