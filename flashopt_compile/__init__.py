"""Drop-in PyTorch optimizers that train with 7 bytes per parameter, every step compiled from pure PyTorch."""

from flashopt_compile.inductor import versions  # noqa: F401  # before what other versions of torch lack is imported

# isort: split
from flashopt_compile.cast import CastReport, cast_model
from flashopt_compile.checkpoint.file import load, save
from flashopt_compile.checkpoint.flashoptim import flashoptim_state_dict
from flashopt_compile.checkpoint.states import library_version
from flashopt_compile.inspection.numerics import Health, NumericsError
from flashopt_compile.optimizer import FlashOptimizer
from flashopt_compile.optimizers import FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW
from flashopt_compile.planning.plan import MemoryPlan, memory_plan
from flashopt_compile.release.handle import GradientReleaseHandle, enable_gradient_release
from flashopt_compile.rule import Moved, debias, ema, number, rule, unbias
from quant import ROOT8, SIGNED8, compute_ecc_bits, dequantize, quantize, reconstruct_fp32_param

__version__ = library_version()

__all__ = [
    "ROOT8",
    "SIGNED8",
    "CastReport",
    "FlashAdam",
    "FlashAdamW",
    "FlashLion",
    "FlashOptimizer",
    "FlashSGD",
    "FlashSGDW",
    "GradientReleaseHandle",
    "Health",
    "MemoryPlan",
    "Moved",
    "NumericsError",
    "__version__",
    "cast_model",
    "compute_ecc_bits",
    "debias",
    "dequantize",
    "ema",
    "enable_gradient_release",
    "flashoptim_state_dict",
    "load",
    "memory_plan",
    "number",
    "quantize",
    "reconstruct_fp32_param",
    "rule",
    "save",
    "unbias",
]
