"""
The classes and helpers of a handler in the sandbox: yieldables, results and the context, built from JSON.

The text below runs in the sandbox, before the agent file. Objects of the host would expose their classes, so only JSON enters and
leaves. A yield leaves as a class name with attributes, and the host decodes it as untrusted data. The sandbox has neither properties nor
inheritance. So the large fields of a state are fetched by a function, and ``source_rewriter`` replaces their attributes by its call.
"""

from __future__ import annotations

import inspect

from stepengine.data.yields import YIELDS

ERRORS = {
    "StepEngineError": "OSError",
    "BadYield": "FileExistsError",
    "ToolInputError": "IsADirectoryError",
    "ToolNotAvailable": "IsADirectoryError",
    "ToolError": "PermissionError",
    "ChildError": "NotADirectoryError",
    "ModelError": "TimeoutError",
    "LimitExceeded": "FileNotFoundError",
    "LimitReached": "KeyboardInterrupt",
    "GeneratorExit": "SystemExit",
    "AgentError": "(FileExistsError, IsADirectoryError, NotADirectoryError)",
}
"""
The builtin exception of the sandbox that represents each exception of the package, since the sandbox has no custom exception classes.

Exceptions of files are used, since it has no files: each can be caught by its name, and all by ``StepEngineError``. The two that
``except Exception`` does not catch, ``LimitReached`` and ``GeneratorExit``, are represented by two with the same property.
"""

TEXT = '''
import asyncio
from datetime import datetime, timedelta

def cast(kind, value):
    return value

TYPE_CHECKING = False
Mapping = MutableMapping = dict
MutableSequence = list
Sequence = (list, tuple, str, range)
Set = MutableSet = (set, frozenset)
Collection = Iterable = (list, tuple, str, range, dict, set, frozenset)
Steps = Yieldable = Message = Transcript = None
_se_sent = []
_se_fields = {}

class _se_Sentinel:
    def __init__(self, name):
        self.name = name
    def __repr__(self):
        return self.name

STEP = _se_Sentinel("STEP")
STEP_ALL = _se_Sentinel("STEP_ALL")

class ToolCall:
    def __init__(self, tool, input=None, include_tool_call=True):
        self.tool = tool
        self.input = {} if input is None else input
        self.include_tool_call = include_tool_call

class Parallel:
    def __init__(self, *calls, fail_fast=False, concurrency=None):
        self.calls = list(calls[0]) if len(calls) == 1 and isinstance(calls[0], (list, tuple)) else list(calls)
        self.fail_fast = fail_fast
        self.concurrency = concurrency

class Race:
    def __init__(self, *members):
        self.members = list(members[0]) if len(members) == 1 and isinstance(members[0], (list, tuple)) else list(members)

class Sleep:
    def __init__(self, seconds=None, *, until=None):
        self.seconds = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
        self.until = until.isoformat() if isinstance(until, datetime) else until

class Receive:
    def __init__(self, topic, timeout=None, *, schema=None):
        self.topic = topic
        self.timeout = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self.schema = schema

class Start:
    def __init__(self, *calls, on_return="cancel"):
        self.calls = list(calls)
        self.on_return = on_return

class Wait:
    def __init__(self, *refs, need="all", timeout=None):
        self.refs = list(refs[0]) if len(refs) == 1 and isinstance(refs[0], (list, tuple)) else list(refs)
        self.need = need
        self.timeout = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout

class StepWith:
    def __init__(self, model=None, tools=None, tool_choice=None, settings=None):
        self.model = model
        self.tools = tools
        self.tool_choice = tool_choice
        self.settings = settings

class Complete:
    def __init__(self, messages, *, model=None, system_prompt=None, settings=None):
        self.messages = messages
        self.model = model
        self.system_prompt = system_prompt
        self.settings = settings

class ModelSettings:
    def __init__(self, **fields):
        self.fields = fields

class Thinking:
    def __init__(self, *words, **fields):
        self.words = list(words)
        self.fields = fields

class Limits:
    def __init__(self, **fields):
        self.fields = fields

class AgentDefinition:
    def __init__(self, id, **fields):
        self.id = id
        self.fields = fields
        self.tools = fields.get("tools", ())
        self.spawnable_agents = fields.get("spawnable_agents", ())

def load_agent(agent_id):
    return AgentDefinition(agent_id, _se_is_elsewhere=True)

def _se_agent(agent_id):
    return AgentDefinition(agent_id, _se_is_elsewhere=True)

class _se_Schema:
    def __init__(self, name):
        self.name = name

def _se_schema(name):
    return _se_Schema(name)

class _se_Record:
    def __init__(self, kind, fields, order):
        self._se_kind = kind
        self._se_order = order
        for name, value in fields.items():
            setattr(self, name, value)
    def model_dump(self, *, mode="python", exclude_none=False):
        return _se_plain(self, exclude_none)
    def __repr__(self):
        return self._se_kind + "(" + ", ".join([name + "=" + repr(getattr(self, name)) for name in self._se_order]) + ")"
    def __str__(self):
        return " ".join([name + "=" + repr(getattr(self, name)) for name in self._se_order])
    def __eq__(self, other):
        return type(other) is _se_Record and self._se_kind == other._se_kind and _se_plain(self) == _se_plain(other)

def _se_plain(value, is_short=False, how=("", None)):
    kind, inner = _se_shape(how, value)
    if type(value) is _se_Record:
        kind, inner = "class", value._se_kind
        value = {name: getattr(value, name) for name in value._se_order if hasattr(value, name)}
    if isinstance(value, dict):
        shapes = _se_fields[inner]["models"] if kind == "class" and inner in _se_fields else {}
        of_all = inner if kind == "dict" else ("", None)
        return {
            name: _se_plain(one, is_short, shapes.get(name, of_all))
            for name, one in value.items() if one is not None or not is_short or kind != "class"
        }
    if isinstance(value, (list, tuple)):
        of_all = inner if kind == "list" else ("", None)
        return [_se_plain(value[at], is_short, inner[at] if kind == "tuple" else of_all) for at in range(len(value))]
    return value

def _se_shape(how, value):
    """Give the shape of a value that is no record: of a union, the first one for its type."""
    kind, inner = how
    if kind == "union":
        for one in inner:
            found = _se_shape(one, value)
            if found[0]:
                return found
    if kind == "dict" or kind == "class" and _se_fields[inner]["is_dict"]:
        return how if isinstance(value, dict) else ("", None)
    is_list = isinstance(value, (list, tuple)) and (kind == "list" or kind == "tuple" and len(inner) == len(value))
    return how if is_list else ("", None)

def _se_class(kind):
    known = _se_fields[kind]
    def make(**fields):
        for name in fields:
            if name not in known["order"]:
                raise TypeError(kind + " has no field " + repr(name) + ", it has " + ", ".join(known["order"]))
        for name in known["required"]:
            if name not in fields:
                raise TypeError(kind + " needs " + repr(name))
        return _se_Record(kind, {**_se_copy(known["defaults"]), **fields}, known["order"])
    return make

def _se_contains_itself(value):
    above = {}
    waiting = [(value, False)]
    while waiting:
        one, is_left = waiting.pop()
        if is_left:
            above.pop(id(one))
        elif isinstance(one, (list, tuple, dict)):
            if id(one) in above:
                return True
            above[id(one)] = True
            waiting.append((one, True))
            for inner in one.values() if isinstance(one, dict) else one:
                waiting.append((inner, False))
    return False

def _se_copy(value):
    if isinstance(value, dict):
        return {name: _se_copy(inner) for name, inner in value.items()}
    return [_se_copy(inner) for inner in value] if isinstance(value, list) else value

class _se_Object:
    pass

class StepResult:
    pass

class AgentState:
    pass

class ToolResult:
    pass

class ChildResult:
    def unwrap(self):
        if self.is_error:
            raise NotADirectoryError("child " + repr(self.agent_id) + " failed: " + (self.why or self.status))
        return self.output

class ChildRef:
    pass

class Waited:
    pass

class ToolCallPart:
    pass

class ToolMessage:
    pass

def _se_told(message, role, content, tags, kind):
    message.role = role
    message.text = content
    message.content = content
    message.tags = list(tags)
    message._se_stored = {"type": kind, "content": content, "tags": list(tags)}

class UserMessage:
    def __init__(self, content="", tags=()):
        _se_told(self, "user", content, tags, "user_message")

class AssistantMessage:
    def __init__(self, content="", tags=()):
        _se_told(self, "assistant", content, tags, "assistant_message")
        self.text_without_thoughts = content
        self.tool_calls = []
        self.thinking = []

_se_kinds = {
    "StepResult": StepResult, "AgentState": AgentState, "ToolResult": ToolResult, "ChildResult": ChildResult,
    "ChildRef": ChildRef, "Waited": Waited, "ToolCallPart": ToolCallPart, "ToolMessage": ToolMessage,
    "UserMessage": UserMessage, "AssistantMessage": AssistantMessage, "object": _se_Object,
}

def _se_read(told):
    kind, value = told
    if kind == "json":
        return value
    if kind == "list":
        return [_se_read(inner) for inner in value]
    if kind == "tuple":
        return tuple([_se_read(inner) for inner in value])
    if kind == "time":
        return datetime.fromisoformat(value)
    if kind == "record":
        name, fields = value
        return _se_Record(name, {field: _se_read(inner) for field, inner in fields.items()}, list(fields))
    if kind == "dict":
        return {name: _se_read(inner) for name, inner in value.items()}
    made = _se_kinds[kind]()
    for name, inner in value.items():
        setattr(made, name, _se_read(inner))
    return made

def _se_got(told):
    return _se_read(told)

def _se_value(told):
    return _se_read(told)

def _se_lazy(value, name):
    if type(value) is AgentState:
        if name in ("message_history", "view"):
            return _se_messages(name, value._se_number)
        return _se_read(_se_host(name, value._se_number))
    if type(value) is StepContext and name in ("inherited_messages", "prompt_messages"):
        return tuple(_se_messages(name, 0))
    return getattr(value, name)

def _se_method(value, name, how):
    """Give a method that is called later; those of text and collections are no values here."""
    return getattr(value, name) if hasattr(value, name) else lambda *given, **named: how(value, *given, **named)

def _se_added(value, more):
    return list(more) if isinstance(value, list) and not isinstance(more, list) else more

def _se_messages(name, number):
    """Take over what was sent before, and the rest."""
    same, more = _se_host(name, number)
    while len(_se_sent) > same:
        _se_sent.pop()
    for told in more:
        _se_sent.append(_se_read(told))
    return list(_se_sent)

class _se_Logger:
    def debug(self, message, **data):
        _se_host("log", "debug", message, data)
    def info(self, message, **data):
        _se_host("log", "info", message, data)
    def warning(self, message, **data):
        _se_host("log", "warning", message, data)
    def error(self, message, **data):
        _se_host("log", "error", message, data)

class _se_Random:
    def random(self):
        return _se_host("random", "random", [])
    def uniform(self, a, b):
        return _se_host("random", "uniform", [a, b])
    def randint(self, a, b):
        return _se_host("random", "randint", [a, b])
    def randrange(self, *bounds):
        return _se_host("random", "randrange", list(bounds))
    def getrandbits(self, k):
        return _se_host("random", "getrandbits", [k])
    def gauss(self, mu=0.0, sigma=1.0):
        return _se_host("random", "gauss", [mu, sigma])
    def choice(self, seq):
        return seq[_se_host("random", "choice", [len(seq)])]
    def sample(self, population, k):
        return [population[at] for at in _se_host("random", "sample", [len(population), k])]
    def shuffle(self, x):
        order = _se_host("random", "shuffle", [len(x)])
        x[:] = [x[at] for at in order]

class StepContext:
    def now(self):
        return _se_read(_se_host("now"))
    def notify(self, message, data=None):
        _se_host("notify", message, data)

def _se_context():
    ctx = _se_fill(StepContext(), _se_host("begin"))
    ctx.logger = _se_Logger()
    ctx.random = _se_Random()
    return ctx

def _se_fill(made, told):
    for name, inner in told.items():
        setattr(made, name, _se_read(inner))
    return made

async def map_agents(agent, items, *, prompt=None, params=None, concurrency=8):
    calls = []
    for item in items:
        if prompt is not None or params is not None:
            text = prompt or "" if prompt is None or isinstance(prompt, str) else prompt(item)
            calls.append(AgentCall(agent, text, None if params is None else params(item)))
        elif isinstance(item, str):
            calls.append(AgentCall(agent, item))
        elif isinstance(item, dict):
            calls.append(AgentCall(agent, "", item))
        else:
            raise FileExistsError("item " + str(len(calls)) + " of map_agents is a " + type(item).__name__ + ", which is neither a prompt (a string) nor params (a mapping); pass prompt= or params= as a function of the item, such as prompt=str")
    return _se_value(await _se_from(Parallel(calls, concurrency=max(concurrency, 1)))) if calls else ()

async def best_of(agent, prompt="", params=None, *, n=3, concurrency=8, judge):
    children = await map_agents(agent, list(range(max(n, 1))), prompt=prompt, params=lambda _: params, concurrency=concurrency)
    outputs = [child.output for child in children if not child.is_error]
    if not outputs:
        return children[0].unwrap()
    index = judge(outputs)
    if not isinstance(index, int) or not 0 <= index < len(outputs):
        raise FileExistsError("the judge of best_of chose " + repr(index) + "; there are " + str(len(outputs)) + " outputs, counted from 0")
    return outputs[index]

async def call(tool, as_=object, **input):
    result = _se_value(await _se_from(ToolCall(tool, input)))
    given = result.text if as_ is str or result.data is None else result.data
    if as_ is object or isinstance(given, as_):
        return given
    raise PermissionError("tool " + repr(tool) + " gave a " + type(given).__name__ + ", not a " + as_.__name__)
'''


def _class_source(kind: type) -> str:
    """Return the source of a class with the name and parameters of *kind*; each argument becomes an attribute."""
    parameters = inspect.signature(kind).parameters.values()
    bare = inspect.Signature([parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters])
    kept = "".join([f"        self.{parameter.name} = {parameter.name}\n" for parameter in parameters])
    return f"\nclass {kind.__name__}:\n    def __init__(self, {str(bare)[1:]}:\n{kept}"


PRELUDE = TEXT + "".join(
    [
        _class_source(row.kind)
        for row in YIELDS
        if row.for_sandbox and f"\n{row.name} = " not in TEXT and f"\nclass {row.name}:" not in TEXT
    ]
)
