"""
A handler that decides after each model step whether to take another one.

It stops when it has spent its token budget, and continues once if the model stops too early. ``python examples/drive_steps.py`` needs
no key.
"""

from stepengine import STEP, AgentDefinition, Engine, StepContext, Steps, ToolCall, Usage, tool
from stepengine.testing import ScriptedModel, text, tool_call

BUDGET = 3_000


@tool
def look_up(word: str) -> str:
    """Look a word up."""
    return f"{word}: see the next word"


def handle_steps(ctx: StepContext) -> Steps[dict[str, object]]:
    """Take steps until the budget is spent; a model that stops after one step is asked to go on."""
    nudged = False
    while True:
        turn = yield STEP
        spent = turn.agent_state.usage.total_tokens
        ctx.notify(f"step {turn.agent_state.step_index}: {spent} of {BUDGET} tokens")
        if spent >= BUDGET:
            return {"reason": "budget", "tokens": spent, "nudged": nudged}
        if turn.steps_complete and not nudged:  # the model's wish; the handler overrides it
            nudged = True
            yield ToolCall("add_message", {"role": "user", "content": "Go on."}, include_tool_call=False)
        elif turn.steps_complete:
            return {"reason": "done", "tokens": spent, "nudged": nudged}


reader = AgentDefinition("reader", model="anthropic/claude-sonnet-4-5", tools=[look_up], handle_steps=handle_steps)


def main() -> None:
    each = Usage(input_tokens=900, output_tokens=100)
    endless = [tool_call("look_up", {"word": word}, usage=each) for word in ("apple", "pear", "plum", "quince")]
    model = ScriptedModel([text("I am done.", usage=each), *endless])

    def show(event: object) -> None:
        if getattr(event, "type", "") == "notification":
            print("  ", event.message)  # type: ignore[attr-defined]

    with Engine([reader], models=model, observers=[show]) as engine:
        result = engine.run_sync("reader", "Look words up.")

    print(result.output)
    print(f"{len(model.calls)} of {1 + len(endless)} replies were asked for")
    assert result.output == {"reason": "budget", "tokens": 3_000, "nudged": True}


if __name__ == "__main__":
    main()
