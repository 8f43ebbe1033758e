"""Answer a customer with Google's SDK: streamed content and a tool loop."""

from typing import Any

from google import genai
from google.genai import types
from orders import find_order

PROMPT = "You answer the customers of a shop in one sentence."
CONFIG = types.GenerateContentConfig(
    system_instruction=PROMPT,
    tools=[find_order],
    automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
)


def answer(question: str) -> str:
    client = genai.Client()
    contents: list[Any] = [types.UserContent(question)]
    while True:
        parts: list[types.Part] = []
        for chunk in client.models.generate_content_stream(model="gemini-3-pro", contents=contents, config=CONFIG):
            for candidate in chunk.candidates or ():
                parts += (candidate.content.parts or ()) if candidate.content else ()
        calls = [part.function_call for part in parts if part.function_call]
        if not calls:
            return "".join(part.text or "" for part in parts)
        contents.append(types.ModelContent(parts))
        results = [
            types.Part.from_function_response(name=call.name, response={"result": find_order(**call.args)})
            for call in calls
        ]
        contents.append(types.UserContent(results))


if __name__ == "__main__":
    print(answer("Where is order 17?"))
