"""Answer a customer with the asynchronous Anthropic SDK: raw stream events and a tool loop."""

import asyncio
import json
from typing import Any

from anthropic import AsyncAnthropic
from orders import find_order

PROMPT = "You answer the customers of a shop in one sentence."
NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
TOOL: Any = {"name": "find_order", "description": find_order.__doc__, "input_schema": NUMBER}


async def answer(question: str) -> str:
    async with AsyncAnthropic() as client:
        messages: list[Any] = [{"role": "user", "content": question}]
        while True:
            blocks = await read_blocks(client, messages)
            calls = [block for block in blocks if block["type"] == "tool_use"]
            if not calls:
                return "".join(block["text"] for block in blocks)
            results = [
                {"type": "tool_result", "tool_use_id": call["id"], "content": find_order(**call["input"])}
                for call in calls
            ]
            messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]


async def read_blocks(client: AsyncAnthropic, messages: list[Any]) -> list[Any]:
    blocks: list[Any] = []
    arguments = ""
    stream = await client.messages.create(
        model="claude-opus-5", max_tokens=1_000, system=PROMPT, messages=messages, tools=[TOOL], stream=True
    )
    async for event in stream:
        if event.type == "content_block_start":
            blocks.append(event.content_block.model_dump(exclude_none=True))
            arguments = ""
        elif event.type == "content_block_delta" and event.delta.type == "text_delta":
            blocks[-1]["text"] += event.delta.text
        elif event.type == "content_block_delta" and event.delta.type == "input_json_delta":
            arguments += event.delta.partial_json
        elif event.type == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(arguments)
        elif event.type == "message_stop":
            break
    return blocks


if __name__ == "__main__":
    print(asyncio.run(answer("Where is order 17?")))
