"""Lets a compiled graph update its caches where they lie, as eager PyTorch does.

XLA does not write to memory that it has only borrowed from PyTorch: it copies an argument that a
program overwrites, and PyTorch copies the result back. So the graph is cut at our updates in place.
These run eagerly, on the tensors themselves; what lies between them is compiled.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch.fx import GraphModule
from torch.fx.passes.split_module import split_module

Run = Callable[..., list[Any]]
Node = Any  # torch.fx.Node, whose arguments are of too many types to be told apart


def cut_at_updates(graph: GraphModule, compiled: Callable[[GraphModule], Run]) -> Run | None:
    """The graph with its updates run eagerly and its other parts compiled. None: it has no update
    that can be in place.

    Args:
        graph: functional, as AOTAutograd makes it. An update is a node auto_functionalized_v2,
            which copies the tensors that it updates unless it is told not to.
        compiled: compiles a part. The parts' results are lists.
    """
    graph = GraphModule(graph, copy.deepcopy(graph.graph))
    if not _put_updates_in_place(graph.graph):
        return None
    parts = split_module(graph, graph, _numbers(graph.graph).__getitem__, keep_original_order=True)
    for name, part in list(parts.named_children()):
        if _is_compiled(int(name.removeprefix("submod_"))):
            setattr(parts, name, _Part(part, compiled(part)))
    return lambda *arguments: list(parts(*arguments))


class _Part(torch.nn.Module):
    """Calls a compiled part with the signature of the module that it replaces."""

    def __init__(self, part: GraphModule, run: Run) -> None:
        super().__init__()
        self._run = run
        self._has_one_result = isinstance(part.graph.output_node().args[0], torch.fx.Node)

    def forward(self, *arguments: Any) -> Any:
        results = self._run(*arguments)
        return results[0] if self._has_one_result else results


def _put_updates_in_place(graph: torch.fx.Graph) -> bool:
    """Marks updates as in place if no later node reads the argument that they overwrite. They copy
    what the graph computes, such as a query. Returns whether there are such updates."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    found = False
    for update in graph.find_nodes(op="call_function", target=auto_functionalized_v2):
        roots = [_root(base) for base in update.kwargs["_all_bases"]]
        arguments = [root for root in roots if root.op == "placeholder"]
        readers = {user for root in arguments for alias in _aliases(root) for user in alias.users}
        if (
            update.args[0].namespace == "xla_gpu"
            and arguments
            and all(order[reader] <= order[update] for reader in readers)
        ):
            computed = [i for i, root in enumerate(roots) if root not in arguments]
            update.update_kwarg("_only_clone_these_bases", tuple(computed))
            found = True
    return found


def _is_in_place(node: Node) -> bool:
    return node.target is auto_functionalized_v2 and "_only_clone_these_bases" in node.kwargs


def _is_view(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _root(base: Node) -> Node:
    """The argument that a tensor is after some updates in place; another tensor is its own root."""
    while base.target is operator.getitem and _is_in_place(base.args[0]):
        update, result = base.args
        number = _base_number(update, result)
        if number in update.kwargs["_only_clone_these_bases"]:
            break
        base = update.kwargs["_all_bases"][number]
    return base


def _base_number(update: Node, number: int) -> int:
    """Which of an update's bases its result `number` is; the bases come last."""
    return number - (len(update.args[0]._schema.returns) or 1)


def _aliases(root: Node) -> list[Node]:
    """A tensor, its views, and what updates in place return of it."""
    aliases = [root]
    for alias in aliases:  # grows meanwhile
        for user in alias.users:
            if _is_view(user):
                aliases.append(user)
            elif _is_in_place(user):
                aliases += [result for result in user.users if _root(result) is root]
    return list(dict.fromkeys(aliases))


def _numbers(graph: torch.fx.Graph) -> dict[Node, int]:
    """The part that each node belongs to: odd ones are compiled, even ones run eagerly."""
    numbers: dict[Node, int] = {}
    eager: set[Node] = set()
    number = 1
    for node in graph.nodes:
        if _is_in_place(node) or (
            node.all_input_nodes
            and node.all_input_nodes[0] in eager
            and (_is_view(node) or node.target is operator.getitem)
        ):
            eager.add(node)
        if _is_compiled(number) == (node in eager):
            number += 1
        numbers[node] = number
    return numbers


def _is_compiled(number: int) -> bool:
    return number % 2 == 1
