"""Which expressions are counts, sizes and indices. Mutating those changes shapes or speed, not the mathematics."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_CALLS = {"len", "int", "ceil", "floor", "prod", "numel", "dim", "index"}
_OF_COUNTS = {"sum", "max", "min", "abs", "list", "tuple"}  # counts when their arguments are
_ATTRIBUTES = {"ndim", "start", "stop", "step"}
_KEPT = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Pow, ast.LShift)


def whole_attributes(trees: Iterable[ast.Module]) -> frozenset[str]:
    """Fields annotated int, and methods and properties that return one, unless another class has a tensor there."""
    found, tensors = set(_ATTRIBUTES), set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if _is_int(node.annotation):
                found.add(node.target.id)
            elif "Tensor" in ast.unparse(node.annotation):
                tensors.add(node.target.id)
        if isinstance(node, ast.FunctionDef) and node.returns is not None and _is_int(node.returns):
            found.add(node.name)
    return frozenset(found - tensors)


@dataclass(frozen=True)
class Counts:
    """What is known to hold a whole number: local names and attributes."""

    names: frozenset[str]
    attributes: frozenset[str]

    @classmethod
    def within(cls, function: ast.FunctionDef, attributes: frozenset[str]) -> Counts:
        """Arguments annotated int, and what is assigned from counts, in a function and those inside it."""
        nodes = list(ast.walk(function))
        names = {arg.arg for arg in nodes if isinstance(arg, ast.arg) and arg.annotation and _is_int(arg.annotation)}
        for _ in range(3):  # a count of counts of counts
            known = cls(frozenset(names), attributes)
            names |= {name for node in nodes for name in known._assigned(node)}
        return cls(frozenset(names), attributes)

    def holds(self, node: ast.AST) -> bool:
        match node:
            case ast.Constant(value=value):
                return isinstance(value, int)
            case ast.Compare():
                return True
            case ast.Name(id=name):
                return name in self.names
            case ast.Attribute(attr=attr):
                return attr == "shape" or attr in self.attributes
            case ast.Call(func=func, args=args):
                called = func.id if isinstance(func, ast.Name) else getattr(func, "attr", "")
                counts = called in _OF_COUNTS and isinstance(func, ast.Name) and all(map(self.holds, args))
                return called in _CALLS or called in self.attributes or counts
            case ast.BinOp(left=left, op=op, right=right):
                return isinstance(op, _KEPT) and self.holds(left) and self.holds(right)
            case ast.Subscript(value=inner) | ast.UnaryOp(operand=inner) | ast.GeneratorExp(elt=inner):
                return self.holds(inner)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return all(map(self.holds, elements))
            case ast.IfExp(body=body, orelse=orelse):
                return self.holds(body) and self.holds(orelse)
        return False

    def _assigned(self, node: ast.AST) -> Iterator[str]:
        match node:
            case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from self._paired(target, value)
            case ast.For(target=target, iter=values) | ast.comprehension(target=target, iter=values):
                called = getattr(values.func, "id", "") if isinstance(values, ast.Call) else ""
                if called == "range" or self.holds(values):
                    yield from _names(target)
                if called == "enumerate" and isinstance(target, ast.Tuple):
                    yield from _names(target.elts[0])

    def _paired(self, target: ast.expr, value: ast.expr) -> Iterator[str]:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, other in zip(target.elts, value.elts, strict=True):
                yield from self._paired(one, other)
        elif self.holds(value):
            yield from _names(target)


def _is_int(annotation: ast.expr) -> bool:
    """An int, or a sequence of them."""
    words = set(re.findall(r"\w+", ast.unparse(annotation)))
    return words <= {"int", "tuple", "list", "Sequence", "None", "torch", "Size"} and bool(words & {"int", "Size"})


def _names(target: ast.expr) -> Iterator[str]:
    return (node.id for node in ast.walk(target) if isinstance(node, ast.Name))
