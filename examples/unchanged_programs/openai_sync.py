"""Answer a customer with the OpenAI SDK: streamed chat completions and a tool loop."""

import json
from typing import Any

from openai import OpenAI
from orders import find_order

PROMPT = "You answer the customers of a shop in one sentence."
NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
TOOL: Any = {
    "type": "function",
    "function": {"name": "find_order", "description": find_order.__doc__, "parameters": NUMBER},
}


def answer(question: str) -> str:
    client = OpenAI()
    messages: list[Any] = [{"role": "system", "content": PROMPT}, {"role": "user", "content": question}]
    while True:
        text, calls = "", {}
        for chunk in client.chat.completions.create(model="gpt-5", messages=messages, tools=[TOOL], stream=True):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for delta in choice.delta.tool_calls or ():
                    call = calls.setdefault(delta.index, {"id": delta.id, "name": delta.function.name, "arguments": ""})
                    call["arguments"] += delta.function.arguments or ""
        if not calls:
            return text
        asked = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in calls.values()
        ]
        messages.append({"role": "assistant", "content": text or None, "tool_calls": asked})
        for call in calls.values():
            result = find_order(**json.loads(call["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


if __name__ == "__main__":
    print(answer("Where is order 17?"))
