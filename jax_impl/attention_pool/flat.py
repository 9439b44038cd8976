"""A jaxpr with its calls opened up, and the mark by which attention is known in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jax
from jax.extend import core

from reference.vocab.errors import Unsupported

MARK = "lamina_attention"
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
"""Primitives that only call, with the parameter that holds what they call."""


def attention(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks an attention operator: f(q, k, v, *others) -> attended, or (attended, *new cache).
    Everything it reads is an argument."""

    @wraps(function)
    def marked(*args: Any) -> Any:
        count = len(jax.tree.leaves(args))

        def call(*inner: Any) -> Any:
            return function(*inner)

        call.__name__ = f"{MARK}_{count}"
        return jax.jit(call)(*args)

    return marked


@dataclass(frozen=True)
class Node:
    """One operator of the flat program. Atoms are value numbers, or literals in a 1-tuple."""

    name: str
    reads: tuple[Any, ...]
    makes: tuple[int, ...]
    bind: Callable[..., Any]
    attention: bool

    def values(self) -> tuple[int, ...]:
        """The numbered values that it reads."""
        return tuple(a for a in self.reads if isinstance(a, int))


class Flat:
    """A jaxpr with its calls opened up: nodes in order, values numbered, inputs first."""

    def __init__(self, closed: Any) -> None:
        self.nodes: list[Node] = []
        self.avals: list[Any] = []
        self.constants: dict[int, Any] = {}
        env: dict[Any, Any] = {}
        self.inputs = [self._new(v, env) for v in closed.jaxpr.invars]
        for v, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            self.constants[self._new(v, env)] = value
        self._open(closed.jaxpr, env)
        self.outputs = [self._atom(v, env) for v in closed.jaxpr.outvars]

    def _new(self, var: Any, env: dict[Any, Any]) -> int:
        self.avals.append(var.aval)
        env[var] = len(self.avals) - 1
        return env[var]

    def _atom(self, atom: Any, env: dict[Any, Any]) -> Any:
        return (atom.val,) if isinstance(atom, core.Literal) else env[atom]

    def _open(self, jaxpr: Any, env: dict[Any, Any]) -> None:
        for eqn in jaxpr.eqns:
            name, marked = eqn.primitive.name, _is_marked(eqn)
            if name in CALLS and not marked:
                inner = eqn.params[CALLS[name]]
                body, consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
                within = {}
                for v, value in zip(body.constvars, consts, strict=True):
                    self.constants[self._new(v, within)] = value
                for v, a in zip(body.invars, eqn.invars, strict=True):
                    within[v] = self._atom(a, env)
                self._open(body, within)
                for v, a in zip(eqn.outvars, body.outvars, strict=True):
                    env[v] = self._atom(a, within)
                continue
            if not marked and _mentions(eqn):
                raise Unsupported(
                    "convert",
                    f"attention inside {name}",
                    "attention at the top or inside jit; unroll the loop over layers",
                )
            # An attention's arguments have places; another operator reads each variable once.
            given = list(eqn.invars)
            if not marked:
                given = list(dict.fromkeys(a for a in given if not isinstance(a, core.Literal)))
            reads = tuple(self._atom(a, env) for a in given)
            makes = tuple(self._new(v, env) for v in eqn.outvars)
            bind = _attention_of(eqn) if marked else _alone(eqn, given)
            self.nodes.append(Node(name, reads, makes, bind, marked))


def _attention_of(eqn: Any) -> Callable[..., Any]:
    """The marked function, as one program."""
    return jax.jit(core.jaxpr_as_fun(eqn.params[CALLS[eqn.primitive.name]]))


def _alone(eqn: Any, variables: list[Any]) -> Callable[..., Any]:
    """One operator as a function of the variables that it reads."""
    told = core.DebugInfo(
        "slice", eqn.primitive.name, ("",) * len(variables), ("",) * len(eqn.outvars)
    )
    body = core.Jaxpr((), variables, eqn.outvars, [eqn], eqn.effects, debug_info=told)
    return core.jaxpr_as_fun(core.ClosedJaxpr(body, ()))


def _is_marked(eqn: Any) -> bool:
    name = str(eqn.params.get("name", ""))
    if not (eqn.primitive.name in CALLS and name.startswith(f"{MARK}_")):
        return False
    if len(eqn.invars) != int(name.removeprefix(f"{MARK}_")):
        raise Unsupported(
            "convert", "attention that closes over computed values", "passing them as arguments"
        )
    return True


def _inner(value: Any) -> list[Any]:
    """The jaxprs in a parameter."""
    if isinstance(value, (tuple, list)):
        return [j for v in value for j in _inner(v)]
    body = getattr(value, "jaxpr", value)
    return [body] if hasattr(body, "eqns") else []


def _mentions(eqn: Any) -> bool:
    """An attention is marked somewhere inside it."""
    return any(
        str(e.params.get("name", "")).startswith(f"{MARK}_") or _mentions(e)
        for value in eqn.params.values()
        for body in _inner(value)
        for e in body.eqns
    )
