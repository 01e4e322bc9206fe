"""Number formats with proven bounds: how fp32 becomes bytes and comes back."""

from quant.compand import Compander
from quant.format import Format, Part, Raw, WeightFormat
from quant.grouped import ROOT8, SIGNED8, Grouped, dequantize, quantize
from quant.split import Rounded, Split, compute_ecc_bits, reconstruct_fp32_param

__all__ = [
    "ROOT8",
    "SIGNED8",
    "Compander",
    "Format",
    "Grouped",
    "Part",
    "Raw",
    "Rounded",
    "Split",
    "WeightFormat",
    "compute_ecc_bits",
    "dequantize",
    "quantize",
    "reconstruct_fp32_param",
]
