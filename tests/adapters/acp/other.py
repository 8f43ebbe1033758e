"""
An agent's program that somebody else might have written, badly or well; it knows nothing of ours and of no package.

Its words say how it behaves; what it is prompted for it answers with one piece of text, unless its way is another one.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WAY = sys.argv[1]
KEPT = Path(sys.argv[2]) if len(sys.argv) > 2 else None
ASKED = itertools.count()


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def saves(how: str) -> None:
    """
    Write the session down, which takes its time.
    """
    assert KEPT is not None
    time.sleep(0.3)
    with KEPT.open("a") as kept:
        kept.write(f"{how}\n")


def read() -> dict[str, Any]:
    line = sys.stdin.readline()
    if not line:
        if WAY == "saves":
            saves("saved at the end of input")
        while WAY == "stays":
            time.sleep(0.05)
        sys.exit(0)
    return json.loads(line)


def tell(session: str, **update: Any) -> None:
    send({"method": "session/update", "params": {"sessionId": session, "update": update}})


def say(session: str, text: str) -> None:
    tell(session, sessionUpdate="agent_message_chunk", content={"type": "text", "text": text})


def ask(method: str, **params: Any) -> dict[str, Any]:
    """
    Ask, and return the answer; a cancellation in between is the answer, too.
    """
    number = f"q{next(ASKED)}"
    send({"id": number, "method": method, "params": params})
    while True:
        answer = read()
        if answer.get("id") == number or answer.get("method") == "session/cancel":
            return answer


OPTIONS = [
    {"optionId": "y", "name": "Yes", "kind": "allow_once"},
    {"optionId": "Y", "name": "Always", "kind": "allow_always"},
    {"optionId": "n", "name": "No", "kind": "reject_once"},
]


def permitted(session: str, **call: Any) -> str:
    answer = ask(
        "session/request_permission", sessionId=session, toolCall={"toolCallId": "t1", **call}, options=OPTIONS
    )
    return str(answer.get("result", {}).get("outcome", {}).get("optionId", "cancelled"))


def dies(session: str, text: str) -> None:
    say(session, "I begin, and")
    print("out of memory", file=sys.stderr)
    os._exit(3)


def waits(session: str, text: str) -> str:
    sleep = [sys.executable, "-S", "-E", "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(sleep, start_new_session=WAY == "escapes")
    assert KEPT is not None
    say(session, "Working.")
    KEPT.write_text(f"{os.getpid()} {child.pid}")
    if WAY == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    while read().get("method") != "session/cancel":
        pass
    KEPT.write_text(f"{KEPT.read_text()} cancelled")
    return "cancelled"


def asks(session: str, text: str) -> None:
    chosen = permitted(session, title="Run the tests", kind="execute", rawInput={"command": "pytest -q"})
    say(session, f"The tests: {chosen}. ")
    chosen = permitted(session, title="Edit shop.py", kind="edit", locations=[{"path": str(Path.cwd() / "shop.py")}])
    say(session, f"The edit: {chosen}.")


def once(session: str, text: str) -> None:
    chosen = permitted(session, title="Edit shop.py", kind="edit", rawInput={"path": "shop.py"})
    say(session, f"The edit: {chosen}.")


def changes(session: str, text: str) -> None:
    """
    Ask to look, and after a restart to run the same command.
    """
    kind = "execute" if text.startswith("You were stopped") else "read"
    permitted(session, title="Look", kind=kind, rawInput={"command": "touch made"})
    ask("terminal/create", sessionId=session, command="touch", args=["made"])


def files(session: str, text: str) -> None:
    for method, params in json.loads(text):
        answer = ask(method, sessionId=session, **params)
        say(session, json.dumps(answer.get("result", answer.get("error", {}).get("message"))) + "\n")


def edits(session: str, text: str) -> None:
    """
    Ask for a permission and write the file twice; then again by another name of the file.
    """
    for name, writes in (("shop.py", 2), ("link", 1)):
        path = str(Path.cwd() / name)
        permitted(session, title=f"Edit {name}", kind="edit", locations=[{"path": path}])
        for number in range(writes):
            ask("fs/write_text_file", sessionId=session, path=path, content=f"{name} {number}\n")


def terminal(session: str, text: str) -> None:
    """
    Run a command as the text says, print what became of it, and leave another one at work.
    """

    def do(method: str, **params: Any) -> dict[str, Any]:
        return ask(f"terminal/{method}", sessionId=session, **params)

    for words in json.loads(text):
        made = do(
            "create", command=words[0], args=words[1:], env=[{"name": "GIVEN", "value": "by me"}], outputByteLimit=20
        )
        if "error" in made:
            say(session, json.dumps(made["error"]["message"]) + "\n")
            continue
        name = made["result"]["terminalId"]
        ended = do("wait_for_exit", terminalId=name)["result"]
        said = do("output", terminalId=name)["result"]
        do("release", terminalId=name)
        say(session, json.dumps([ended, said]) + "\n")
    do("create", command=sys.executable, args=["-c", "import time; time.sleep(600)"])
    say(session, json.dumps(do("create", command="sh", cwd="/").get("error", {}).get("message")))


def repeats(session: str, text: str) -> None:
    say(session, "Done.")
    for _ in range(5):
        for number in range(120):
            tell(
                session, sessionUpdate="tool_call", toolCallId=f"t{number}", title="t", rawInput={"command": "x" * 500}
            )


def plans(session: str, text: str) -> None:
    say(session, "Done.")
    for _ in range(200):
        tell(session, sessionUpdate="plan", entries=[{"content": "", "status": "pending"}] * 100)


def spends(session: str, text: str) -> None:
    tell(session, sessionUpdate="usage_update", used=9, size=10, cost={"amount": 0.25, "currency": "USD"})
    tell(session, sessionUpdate="usage_update", used=9, size=10, cost={"amount": 0.5, "currency": "USD"})
    say(session, "Spent.")


def odd(session: str, text: str) -> None:
    for update in ({}, {"sessionUpdate": 7}, {"sessionUpdate": "tool_call"}, {"sessionUpdate": "plan", "entries": 3}):
        tell(session, **update)
    tell(session, sessionUpdate="tool_call", toolCallId="t", title=["no"], rawInput={"command": {"a": 1}})
    tell(session, sessionUpdate="agent_message_chunk", content="no block")
    send({"method": "session/update", "params": [1]})
    send({"id": "x", "method": "terminal/create", "params": {"sessionId": session, "command": "id"}})
    send({"id": "nobody", "result": {}})
    sys.stdout.write('[1]\n"text"\n{"id": [2]}\n' + "[" * 100_000 + "\n")
    say(session, "lone \ud800 <tool_call>{}</tool_call>")


def variables(session: str, text: str) -> None:
    say(session, json.dumps(dict(os.environ)))


def slow(session: str, text: str) -> str | None:
    """
    Wait to be cancelled, but for who finds that somebody allows it to end.
    """
    assert KEPT is not None
    return None if KEPT.with_suffix(".go").exists() else waits(session, text)


WAYS = {
    "dies": dies, "silent": waits, "escapes": waits, "deaf": waits, "asks": asks, "once": once, "changes": changes, "files": files, "edits": edits, "spends": spends, "odd": odd, "repeats": repeats, "plans": plans,
    "env": variables, "slow": slow, "terminal": terminal,
}  # fmt: skip


def prompt(session: str, text: str) -> dict[str, Any]:
    if KEPT is not None and WAY in ("kept", "once"):
        with KEPT.open("a") as kept:
            kept.write(text.partition("\n")[0] + "\n")
    reason = WAYS[WAY](session, text) if WAY in WAYS else None
    if WAY not in WAYS or WAY == "slow":
        say(session, f"You said: {text}")
    if WAY == "spends":
        usage = {"totalTokens": 130, "inputTokens": 100, "outputTokens": 20, "thoughtTokens": 10}
        return {"stopReason": "end_turn", "usage": usage}
    return {"stopReason": reason or "end_turn"}


def told_to_end(*_: object) -> None:
    saves("saved when it was told to")
    sys.exit(0)


def opening() -> None:
    """
    Print what is none of the protocol's.
    """
    if WAY == "stays":
        signal.signal(signal.SIGTERM, told_to_end)
    if WAY == "chatty":
        print("Welcome!\nThis is what I print for people.", flush=True)
    while WAY == "junk":
        print("no JSON", flush=True)
    while WAY == "endless":
        sys.stdout.write("x" * 65_536)
    if WAY == "mute":
        time.sleep(600)


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    session = params.get("sessionId") or f"s{os.getpid()}"
    match method:
        case "initialize":
            can = {"loadSession": WAY in ("kept", "once", "changes")}
            if WAY == "closes":
                can["sessionCapabilities"] = {"close": {}}
            version = {"newer": 2, "nonsense": "one"}.get(WAY, params["protocolVersion"])
            ways = [{"id": "key", "name": "A key of yours"}]
            return {"result": {"protocolVersion": version, "agentCapabilities": can, "authMethods": ways}}
        case "session/new" if WAY == "locked":
            return {"error": {"code": -32000, "message": "Authentication required"}}
        case "session/load":
            say(session, "What was said before.")
        case "session/close":
            saves(f"closed {session}")
        case "session/prompt":
            return {"result": prompt(session, params["prompt"][0]["text"])}
        case _:
            pass
    return {"result": {"sessionId": session}}


def main() -> None:
    opening()
    while True:
        request = read()
        if "method" in request and "id" in request:
            send({"id": request["id"], **answer(request["method"], request.get("params", {}))})


if __name__ == "__main__":
    main()
