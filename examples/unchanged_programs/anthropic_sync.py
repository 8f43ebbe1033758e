"""Answer a customer with the Anthropic SDK: streamed messages and a tool loop."""

from typing import Any

from anthropic import Anthropic
from orders import find_order

PROMPT = "You answer the customers of a shop in one sentence."
NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
TOOL: Any = {"name": "find_order", "description": find_order.__doc__, "input_schema": NUMBER}


def answer(question: str) -> str:
    client = Anthropic()
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        with client.messages.stream(
            model="claude-opus-5", max_tokens=1_000, system=PROMPT, messages=messages, tools=[TOOL]
        ) as stream:
            text = "".join(stream.text_stream)
            reply = stream.get_final_message()
        if reply.stop_reason != "tool_use":
            return text
        messages.append({"role": "assistant", "content": reply.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": find_order(**block.input)}
            for block in reply.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


if __name__ == "__main__":
    print(answer("Where is order 17?"))
