"""Adam (Kingma & Ba, 2015). Weight decay is an L2 penalty on the gradient."""

from flashopt_compile.rule import Moved, debias, ema, number, rule
from quant.grouped import ROOT8, SIGNED8
from quant.ulp import quotient, sqrt


@rule(m=SIGNED8, v=ROOT8)
def adam(w, g, m, v, t, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
    b1, b2 = betas
    g = g + weight_decay * w
    m = ema(m, g, b1)
    v = ema(v, g * g, b2)
    d = sqrt(v) * debias(b2, t, v, power=0.5) + eps
    return Moved(w, quotient(number(-lr * debias(b1, t, m), w) * m, d)), m, v
