"""The kinds of mistake: what may stand in the place of a piece of syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .counts import Counts

Change = tuple[str, ast.AST]  # its kind, and what stands there instead

_SCALES = ("scale", "kappa", "temperature", "weight", "delta", "precision", "alpha")
_SPREADS = ("var", "std")
_CONTAINERS = (ast.List, ast.Tuple, ast.Dict, ast.Set, ast.ListComp, ast.JoinedStr)
_DROPPED = {
    "square": "power",
    "square_": "power",
    "sqrt": "root",
    "sqrt_": "root",
    "reciprocal": "reciprocal",
    "transpose": "transpose",
    "t": "transpose",
}
_REPLACED = {"sum": ("sum for mean", "mean"), "mean": ("sum for mean", "sum"), "rsqrt": ("root", "reciprocal")}
_LOGS = {"log", "log1p", "logdet"}


def changes(node: ast.AST, counts: Counts) -> Iterator[Change]:
    """Everything that may be done to one node; none of it where all of it is counts."""
    match node:
        case ast.BinOp() if _is_numeric(node, counts):
            yield from _of_product(node, counts)
            yield from _of_sum(node)
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            if not counts.holds(operand):
                yield "sign", operand
        case ast.AugAssign(target=target, op=ast.Add() | ast.Sub() as op, value=value):
            if not counts.holds(value) and not counts.holds(target) and not _is_container(value):
                yield "sign", ast.AugAssign(target, _flipped(op), value)
        case ast.Attribute(value=value, attr="T" | "mT" | "mH"):
            yield "transpose", value
        case ast.Call():
            yield from _of_call(node)


def _is_numeric(node: ast.BinOp, counts: Counts) -> bool:
    sides = node.left, node.right
    return not any(map(_is_container, sides)) and not counts.holds(node)


def _is_container(node: ast.expr) -> bool:
    """Text, lists and sets are joined by the same signs."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, str)
        case ast.Call(func=ast.Name(id=name)):
            return name in {"set", "list", "tuple", "str"}
        case ast.IfExp(body=body, orelse=orelse):
            return _is_container(body) or _is_container(orelse)
    return isinstance(node, _CONTAINERS)


def _of_product(node: ast.BinOp, counts: Counts) -> Iterator[Change]:
    left, right = node.left, node.right
    match node.op:
        case ast.Mult():
            yield "times for over", ast.BinOp(left, ast.Div(), right)
            for side, other in ((left, right), (right, left)):
                if _is_number(side):
                    yield "factor", other
                elif _ends(side, _SCALES):
                    yield "scale", other
                elif _ends(side, _SPREADS):
                    yield "variance", ast.BinOp(other, ast.Mult(), _squared(side))
        case ast.Div():
            if isinstance(left, ast.Constant) and left.value == 1:
                yield "reciprocal", right
                return
            yield "times for over", ast.BinOp(left, ast.Mult(), right)
            if _is_number(right):
                yield "factor", left
            elif counts.holds(right) or _ends(right, ("count", "sizes")):
                yield "1/N", left
            elif _ends(right, _SPREADS):
                yield "variance", ast.BinOp(left, ast.Div(), _squared(right))
        case ast.Pow() if _is_number(right):
            yield "power", left
        case ast.MatMult() if _is_matrix(left) or _is_matrix(right):
            yield "sides", ast.BinOp(right, ast.MatMult(), left)


def _of_sum(node: ast.BinOp) -> Iterator[Change]:
    if isinstance(node.op, ast.Add | ast.Sub):
        yield "sign", ast.BinOp(node.left, _flipped(node.op), node.right)


def _of_call(node: ast.Call) -> Iterator[Change]:
    upper = next((k for k in node.keywords if k.arg == "upper" and isinstance(k.value, ast.Constant)), None)
    if upper is not None:
        flipped = ast.keyword("upper", ast.Constant(not upper.value.value))
        yield "sides", ast.Call(node.func, node.args, [flipped if k is upper else k for k in node.keywords])
    called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if called in _LOGS:
        yield "log", ast.BinOp(ast.Constant(2), ast.Mult(), node)
    if not isinstance(node.func, ast.Attribute) or _ends(node.func.value, ("torch", "linalg", "math")):
        return
    if called in _DROPPED:
        yield _DROPPED[called], node.func.value
    elif called in _REPLACED and not isinstance(node.func.value, ast.Compare):  # a count of those that hold
        kind, instead = _REPLACED[called]
        yield kind, ast.Call(ast.Attribute(node.func.value, instead, ast.Load()), node.args, node.keywords)


def _is_number(node: ast.expr) -> bool:
    inner = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(inner, ast.Constant) and isinstance(inner.value, int | float)


def _ends(node: ast.expr, words: tuple[str, ...]) -> bool:
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return any(name.removesuffix("s").endswith(word.removesuffix("s")) for word in words)


def _is_matrix(node: ast.expr) -> bool:
    """By its name, a capital letter, or by a transpose: the product of two vectors has no sides."""
    if isinstance(node, ast.Attribute) and node.attr in {"T", "mT"}:
        return True
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name[:1].isupper()


def _squared(node: ast.expr) -> ast.expr:
    return ast.BinOp(node, ast.Pow(), ast.Constant(2))


def _flipped(op: ast.operator) -> ast.operator:
    return ast.Sub() if isinstance(op, ast.Add) else ast.Add()
