"""SGD: plain, with momentum, and with Nesterov momentum. Weight decay is an L2 penalty (sgd) or decoupled (sgdw).

Without momentum the two are the same.
"""

import torch

from flashopt_compile.rule import Moved, number, rule
from quant.grouped import SIGNED8


def gather(m, g, t, momentum, dampening):
    """The momentum buffer after gradient g. As in torch.optim, the first gradient fills it undamped."""
    first = t == 1
    return number(torch.where(first, 0.0, momentum), m) * m + number(torch.where(first, 1.0, 1 - dampening), m) * g


@rule()
def sgd(w, g, t, *, lr=1e-3, weight_decay=0.0):
    return (Moved(w, -lr * (g + weight_decay * w)),)


@rule(m=SIGNED8)
def sgd_momentum(w, g, m, t, *, lr=1e-3, momentum=0.0, dampening=0.0, weight_decay=0.0):
    m = gather(m, g + weight_decay * w, t, momentum, dampening)
    return Moved(w, -lr * m), m


@rule(m=SIGNED8)
def sgd_nesterov(w, g, m, t, *, lr=1e-3, momentum=0.0, weight_decay=0.0):
    g = g + weight_decay * w
    m = gather(m, g, t, momentum, 0.0)
    return Moved(w, -lr * (g + momentum * m)), m


@rule(m=SIGNED8)
def sgdw_momentum(w, g, m, t, *, lr=1e-3, momentum=0.0, dampening=0.0, weight_decay=0.0):
    m = gather(m, g, t, momentum, dampening)
    return Moved(w, -lr * (m + weight_decay * w)), m


@rule(m=SIGNED8)
def sgdw_nesterov(w, g, m, t, *, lr=1e-3, momentum=0.0, weight_decay=0.0):
    m = gather(m, g, t, momentum, 0.0)
    return Moved(w, -lr * (g + momentum * m + weight_decay * w)), m
