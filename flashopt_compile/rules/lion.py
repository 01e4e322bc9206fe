"""Lion: the sign of an interpolated momentum (Chen et al., 2023)."""

from flashopt_compile.rule import Moved, rule
from quant.grouped import SIGNED8


@rule(m=SIGNED8)
def lion(w, g, m, t, *, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
    b1, b2 = betas
    update = (m + (1 - b1) * (g - m)).sign()
    return Moved(w, -lr * update - (lr * weight_decay) * w), m + (1 - b2) * (g - m)
