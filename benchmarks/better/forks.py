"""
A peer's side of "forks": langgraph is asked to go on from the middle of a subgraph, at its node ``b``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt

from benchmarks.better import GONE

RAN: list[str] = []


class State(TypedDict, total=False):
    """What the graphs share."""

    answer: str


def node(name: str) -> Callable[[State], State]:
    """Return a node that says that it ran."""

    def ran(_: State) -> State:
        RAN.append(name)
        return {}

    return ran


def review(_: State) -> State:
    """Ask a person."""
    RAN.append("review")
    return {"answer": interrupt("Is it good?")}


def main() -> None:
    """Run to the question, go back to ``b`` in the subgraph, and see what runs."""
    inner: Any = StateGraph(State)
    inner.add_node("a", node("a"))
    inner.add_node("b", node("b"))
    inner.add_node("review", review)
    inner.add_edge(START, "a")
    inner.add_edge("a", "b")
    inner.add_edge("b", "review")
    inner.add_edge("review", END)
    outer: Any = StateGraph(State)
    outer.add_node("child", inner.compile())
    outer.add_edge(START, "child")
    outer.add_edge("child", END)
    graph = outer.compile(checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    graph.invoke({}, config)
    (task,) = graph.get_state(config, subgraphs=True).tasks
    place = {name: task.state.config["configurable"][name] for name in ("thread_id", "checkpoint_ns")}
    (before_b,) = [state for state in graph.get_state_history({"configurable": place}) if state.next == ("b",)]
    first = list(RAN)
    RAN.clear()
    graph.invoke(None, before_b.config)
    print(f"the run did {', '.join(first)}; from b on it did {', '.join(RAN)}")
    if "a" not in RAN:
        raise SystemExit(GONE)


if __name__ == "__main__":
    main()
