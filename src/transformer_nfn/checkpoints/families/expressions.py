"""Expressions of data files: a small safe language over the fields of a config.

``first(head_dim, D // head)``: names are fields of ``config.json`` (``rope_parameters.rope_theta``
is a field of a table) or sizes already known; ``first(a, b)`` is the first of them that is present
and not null; numbers, quoted text, ``true``, ``false``, ``null``, arithmetic, comparisons, ``a if b
else c`` and ``list[i]`` work as in Python. Anything else is rejected, and no code in a file is run.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from transformer_nfn.errors import CheckpointError, SpaceError

WORDS = {"true": True, "false": False, "null": None}
RESERVED = {*WORDS, "first", "root"}
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class MissingFieldError(Exception):
    """A field that a config does not have, by its name."""


def parse(text: str) -> ast.expr:
    """Parse an expression of a data file; raises `SpaceError` if it is invalid."""
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise SpaceError(f"'{text}' is no expression of a data file") from None
    return tree


def evaluate(text: str, fields: Mapping[str, Any]) -> Any:
    """Evaluate an expression on the fields of a config.

    Raises `MissingFieldError` for an absent field, `SpaceError` for one of the wrong type.

    >>> evaluate("first(head_dim, D // head)", {"D": 64, "head": 4})
    16
    """
    try:
        return _value(parse(text), fields)
    except (TypeError, ArithmeticError, LookupError, RecursionError) as error:
        raise SpaceError(f"'{text}' has no value ({error})") from error


def names_in(text: str) -> set[str]:
    """The names that an expression reads: config fields, and sizes."""
    names = {node.id for node in ast.walk(parse(text)) if isinstance(node, ast.Name)}
    return names - RESERVED


def fields_in(text: str) -> set[str]:
    """The fields that an expression reads, those of tables by their full names, and the tables.

    >>> sorted(fields_in("first(head_dim, rope.size)"))
    ['head_dim', 'rope', 'rope.size']
    """
    nodes = (node for node in ast.walk(parse(text)) if isinstance(node, ast.Name | ast.Attribute))
    return {ast.unparse(node) for node in nodes} - RESERVED


def truth(value: Any, what: str) -> bool:
    """A boolean of a config; text and numbers are rejected."""
    if value is None:
        raise MissingFieldError(what)
    if not isinstance(value, bool):
        raise SpaceError(f"'{what}' expected true or false, found {shown(value)}")
    return value


def shown(value: Any) -> str:
    """A value of a config for an error message, shortened to one line."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print numbers of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}…"


def unexpected(where: str, what: str, expected: str, found: Any) -> CheckpointError:
    """The error that names what a file should state, and what it states."""
    return CheckpointError(f"'{where}': {what} expected {expected}, found {shown(found)}")


def _value(node: ast.expr, fields: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name):
            return WORDS[name] if name in WORDS else _field(fields, name)
        case ast.Attribute(value=table, attr=name):
            inner = _value(table, fields)
            if not isinstance(inner, Mapping):
                raise MissingFieldError(ast.unparse(node))
            return _field(inner, name)
        case ast.Subscript(value=items, slice=index):
            found, at = _value(items, fields), _value(index, fields)
            if found is None:
                raise MissingFieldError(ast.unparse(items))
            return found[at]
        case ast.Call(func=ast.Name(id="first"), args=args, keywords=[]) if args:
            return _first(args, fields)
        case ast.Call(func=ast.Name(id="root"), args=[arg], keywords=[]):
            return _number(_value(arg, fields)) ** 0.5
        case ast.BinOp(left=a, op=op, right=b) if type(op) in BINARY:
            left, right = (_number(_value(side, fields)) for side in (a, b))
            return BINARY[type(op)](left, right)
        case ast.UnaryOp(op=ast.USub(), operand=a):
            return -_number(_value(a, fields))
        case ast.UnaryOp(op=ast.Not(), operand=a):
            return not _truth(a, fields)
        case ast.BoolOp(op=op, values=values):
            each = (_truth(v, fields) for v in values)
            return all(each) if isinstance(op, ast.And) else any(each)
        case ast.Compare(left=a, ops=[compare], comparators=[b]) if type(compare) in COMPARE:
            return COMPARE[type(compare)](_value(a, fields), _value(b, fields))
        case ast.IfExp(test=test, body=a, orelse=b):
            return _value(a if _truth(test, fields) else b, fields)
    raise SpaceError(f"'{ast.unparse(node)}' is no expression of a data file")


def _truth(node: ast.expr, fields: Mapping[str, Any]) -> bool:
    return truth(_value(node, fields), ast.unparse(node))


def _first(args: list[ast.expr], fields: Mapping[str, Any]) -> Any:
    missing: MissingFieldError | None = None
    for arg in args:
        try:
            value = _value(arg, fields)
        except MissingFieldError as error:
            missing = missing or error
            continue
        if value is not None or arg is args[-1]:
            return value
    raise missing or MissingFieldError(ast.unparse(args[0]))


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise MissingFieldError(name)
    return fields[name]


def _number(value: Any) -> int | float:
    if value is None:
        raise MissingFieldError("null")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{shown(value)} is not a number")
    return value
