"""Answer a customer with Google's asynchronous SDK: a streamed chat that calls the tool itself."""

import asyncio

from google import genai
from google.genai import types
from orders import find_order

PROMPT = "You answer the customers of a shop in one sentence."


async def answer(question: str) -> str:
    client = genai.Client()
    try:
        chat = client.aio.chats.create(
            model="gemini-3-pro",
            config=types.GenerateContentConfig(system_instruction=PROMPT, tools=[find_order]),
        )
        text = ""
        async for chunk in await chat.send_message_stream(question):
            text += chunk.text or ""
        return text
    finally:
        await client.aio.aclose()


if __name__ == "__main__":
    print(asyncio.run(answer("Where is order 17?")))
