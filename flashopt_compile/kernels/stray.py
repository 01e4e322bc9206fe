"""Change emitted code to arithmetic that hardware may use and the interpreter lacks: FMAs, rough quotients, roots."""

import ast
from collections.abc import Callable
from dataclasses import replace

from flashopt_compile.kernels.emit import Emitted


def contracted(emitted: Emitted) -> Emitted:
    """Fuse every product into the sum or difference that uses it, as one FMA. A GPU's compiler may do so."""
    return _rewritten(emitted, _Contract)


def rough(emitted: Emitted, ulps: int) -> Emitted:
    """Move every quotient and inverse root by `ulps`, up or down by the parity of its last bit.

    A GPU's may be two ulps off.
    """
    if abs(ulps) > 2:
        raise ValueError(f"ulps is {ulps}; allowed is −2 to 2.")
    return _rewritten(emitted, lambda: _Roughen(ulps))


def _rewritten(emitted: Emitted, make: Callable[[], ast.NodeTransformer]) -> Emitted:
    module = emitted.source
    for text in emitted.kernels.values():
        tree = ast.parse(text)
        make().visit(tree)
        module = module.replace(text, ast.unparse(ast.fix_missing_locations(tree)))
    return replace(emitted, source=module)


class _Contract(ast.NodeTransformer):
    """Kernels are straight-line code of `name = a op b`. Names that start with tmp are values."""

    def __init__(self) -> None:
        self._products: dict[str, ast.BinOp] = {}

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Name) and target.id.startswith("tmp") and isinstance(value, ast.BinOp):
            if isinstance(value.op, ast.Mult):
                self._products[target.id] = value
            elif isinstance(value.op, ast.Add | ast.Sub):
                node.value = self._fused(value)
        return node

    def _fused(self, value: ast.BinOp) -> ast.expr:
        minus = "-" if isinstance(value.op, ast.Sub) else ""
        for product, other, form in (
            (value.left, value.right, f"libdevice.fma({{a}}, {{b}}, {minus}{{c}})"),
            (value.right, value.left, f"libdevice.fma({minus}{{a}}, {{b}}, {{c}})"),
        ):
            found = self._products.get(product.id) if isinstance(product, ast.Name) else None
            if found is not None:
                parts = {"a": found.left, "b": found.right, "c": other}
                text = form.format(**{name: f"({ast.unparse(part)})" for name, part in parts.items()})
                return ast.parse(text, mode="eval").body
        return value


class _Roughen(ast.NodeTransformer):
    def __init__(self, ulps: int) -> None:
        self._ulps = ulps

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Div):
            return node
        return self._strayed(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return self._strayed(node) if ast.unparse(node.func).endswith(".rsqrt") else node

    def _strayed(self, node: ast.expr) -> ast.expr:
        text = f"libdevice.stray({ast.unparse(node)}, {self._ulps})"
        return ast.parse(text, mode="eval").body
