"""Answer a customer with LangGraph: a graph of a model and its tools, streamed message by message."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from orders import find_order

PROMPT = "You answer the customers of a shop in one sentence."
TOOLS = [tool(find_order)]


def call_model(state: MessagesState) -> dict[str, list]:
    model = ChatOpenAI(model="gpt-5", streaming=True).bind_tools(TOOLS)
    return {"messages": [model.invoke([("system", PROMPT), *state["messages"]])]}


def answer(question: str) -> str:
    graph = StateGraph(MessagesState)
    graph.add_node("model", call_model)
    graph.add_node("tools", ToolNode(TOOLS))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    text = ""
    for message, _ in graph.compile().stream({"messages": [("user", question)]}, stream_mode="messages"):
        if message.type == "AIMessageChunk":
            text += message.text
    return text


if __name__ == "__main__":
    print(answer("Where is order 17?"))
