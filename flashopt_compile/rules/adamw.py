"""AdamW: Adam with decoupled weight decay (Loshchilov & Hutter, 2019)."""

from flashopt_compile.rule import Moved, debias, rule
from quant.grouped import ROOT8, SIGNED8
from quant.ulp import sqrt


@rule(m=SIGNED8, v=ROOT8)
def adamw(w, g, m, v, t, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
    b1, b2 = betas
    m = m + (1 - b1) * (g - m)
    v = v + (1 - b2) * (g * g - v)
    d = sqrt(v) * debias(b2, t, power=0.5) + eps
    return Moved(w, -(lr * debias(b1, t)) * m / d - (lr * weight_decay) * w), m, v
