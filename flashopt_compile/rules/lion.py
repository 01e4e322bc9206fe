"""Lion: the sign of an interpolated momentum (Chen et al., 2023)."""

from flashopt_compile.rule import Moved, ema, number, rule
from quant.grouped import SIGNED8
from quant.ulp import sign


@rule(m=SIGNED8)
def lion(w, g, m, t, *, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
    b1, b2 = betas
    update = sign(ema(m, g, b1))
    return Moved(w, -lr * update - number(lr * weight_decay, w) * w), ema(m, g, b2)
