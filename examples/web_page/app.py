"""
A web page without a framework: it shows a streaming run over AG-UI, and asks its user to approve a tool call.

Start it in this folder with ``uvicorn app:app``, and open the link that it prints. To call a real model, set ``ANTHROPIC_API_KEY``.
"""

import os
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.routing import Mount, Route

from stepengine import AgentDefinition, Engine, tool
from stepengine.adapters.ag_ui import page_hooks
from stepengine.models import ModelReply, ModelRequest
from stepengine.permissions import Policy, Rule
from stepengine.server import Caller, Logins
from stepengine.server import app as serve
from stepengine.testing import ScriptedModel, tool_call

PAGE = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'"
}


@tool
def paint(what: str, colour: str) -> str:
    """Paint something."""
    return f"The {what} is {colour} now."


def reply(request: ModelRequest) -> ModelReply | str:
    """Reply without a key: call paint, then repeat its result."""
    last = request.messages[-1]
    return last.text if last.role == "tool" else tool_call("paint", {"what": "door", "colour": "red"}, text="I will. ")


painter = AgentDefinition("painter", model="anthropic/claude-sonnet-4-5", tools=[paint])
engine = Engine(
    [painter],
    models=None if "ANTHROPIC_API_KEY" in os.environ else ScriptedModel([reply] * 1_000),
    permissions=Policy([Rule.ask_for_tool("paint")]),
    hooks=page_hooks(),
)


def page(request: Request) -> FileResponse:
    return FileResponse(Path(__file__).with_name("page.html"), headers=PAGE)


def script(request: Request) -> FileResponse:
    return FileResponse(Path(__file__).with_name("page.js"))


logins = Logins()
served = serve(engine, runs="runs", logins=logins, shares=["colours"])
routes = [Route("/", page), Route("/page.js", script), Mount("/", served)]
app = Starlette(routes=routes, lifespan=served.lifespan)
print("open http://127.0.0.1:8000" + logins.make_login_link(Caller("you", {"run", "read", "answer"})), flush=True)
