"""Dependencies: how they are made, shared, overridden and refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Annotated, Any

import pytest

from stepengine import Depends, ToolContext, tool
from stepengine.data.events import ToolLog
from stepengine.errors import DefinitionError
from stepengine.tools import ResourceMap


class Settings:
    def __init__(self, ctx: ToolContext) -> None:
        self.user = ctx.user_id


def plain() -> str:
    return "plain"


async def asynchronous() -> str:
    return "asynchronous"


def generator() -> Iterator[str]:
    yield "generator"


async def async_generator() -> AsyncIterator[str]:
    yield "async_generator"


class Callable:
    async def __call__(self) -> str:
        return "object"


@pytest.mark.spec("requirements:E23")
@pytest.mark.parametrize(
    "factory",
    [plain, asynchronous, generator, async_generator, Callable()],
    ids=lambda f: getattr(f, "__name__", "object"),
)
@pytest.mark.parametrize("body", ["sync", "async"])
async def test_every_kind_of_factory_serves_both_kinds_of_bodies(factory: Any, body: str) -> None:
    def sync_body(x: Annotated[str, Depends(factory)]) -> str:
        return x

    async def async_body(x: str = Depends(factory)) -> str:
        return x

    made = tool(name="t")(async_body if body == "async" else sync_body)
    assert (getattr(factory, "__name__", "object")) == (await made.execute({}, ToolContext.for_test())).text


@pytest.mark.spec("requirements:E23", "requirements:E8")
async def test_a_dependency_is_created_once_per_call_unless_disabled() -> None:
    made: list[int] = []

    def count() -> int:
        made.append(1)
        return len(made)

    def nested(n: int = Depends(count)) -> int:
        return n * 10

    @tool(in_thread=False)
    def body(a: int = Depends(count), b: int = Depends(nested), c: int = Depends(count, use_cache=False)) -> list[int]:
        return [a, b, c]

    assert [1, 10, 2] == (await body.execute({}, ToolContext.for_test())).data
    assert [3, 30, 4] == (await body.execute({}, ToolContext.for_test())).data


@pytest.mark.spec("requirements:E23")
async def test_a_factory_may_take_the_context_and_be_a_class() -> None:
    @tool
    def body(settings: Settings = Depends(Settings)) -> str | None:  # noqa: B008
        return settings.user

    assert "u1" == (await body.execute({}, ToolContext.for_test(user_id="u1"))).text


@pytest.mark.spec("requirements:E23")
async def test_a_factory_can_be_overridden_and_reuse_the_original() -> None:
    def url() -> str:
        return "real"

    def connection(where: str = Depends(url)) -> str:
        return f"to {where}"

    async def wrapped(original: str = Depends(url)) -> str:
        return f"{original}-wrapped"

    @tool
    def body(c: str = Depends(connection)) -> str:
        return c

    ctx = ToolContext.for_test()
    assert "to real" == (await body.execute({}, ctx)).text
    assert "to fake" == (await body.execute({}, ctx, overrides={url: lambda: "fake"})).text
    assert "to real-wrapped" == (await body.execute({}, ctx, overrides={url: wrapped})).text
    assert "all fake" == (await body.execute({}, ctx, overrides={connection: lambda: "all fake"})).text


@pytest.mark.spec("requirements:E23")
@pytest.mark.parametrize("in_thread", [True, False])
async def test_an_override_may_depend_on_the_factory_that_it_replaces(in_thread: bool) -> None:
    def real() -> str:
        return "real"

    def fake(original: str = Depends(real)) -> str:
        return f"fake {original}"

    async def asynchronous_fake(original: str = Depends(real)) -> str:
        return f"async {original}"

    @tool(in_thread=in_thread)
    def body(one: str = Depends(real), two: str = Depends(fake)) -> str:
        return f"{one}, {two}"

    ctx = ToolContext.for_test()
    assert "fake real, fake real" == (await body.execute({}, ctx, overrides={real: fake})).text
    assert "async real" == (await body.execute({}, ctx, overrides={real: asynchronous_fake})).text.partition(",")[0]


@pytest.mark.spec("requirements:E10")
@pytest.mark.parametrize("body", ["sync", "async"])
@pytest.mark.parametrize("in_thread", [True, False])
async def test_events_and_logs_of_dependencies_arrive_in_order(body: str, in_thread: bool) -> None:
    seen: list[object] = []
    logger = SimpleNamespace(**dict.fromkeys(("debug", "info", "warning", "error"), seen.append))

    def say(ctx: ToolContext, message: str) -> None:
        ctx.logger.info(message)
        ctx.emit(ToolLog(message=message))
        ctx.record_write(message)  # type: ignore[arg-type]

    def plain(ctx: ToolContext) -> None:
        say(ctx, "plain")

    async def closes(ctx: ToolContext, _: None = Depends(plain)) -> AsyncIterator[None]:
        say(ctx, "opened")
        yield
        say(ctx, "closed")

    for factory, expected in ((plain, ["plain", "body"]), (closes, ["plain", "opened", "body", "closed"])):

        def sync_body(ctx: ToolContext, x: None = Depends(factory)) -> None:
            say(ctx, "body")

        async def async_body(ctx: ToolContext, x: None = Depends(factory)) -> None:
            say(ctx, "body")

        seen.clear()
        made = tool(name="t", in_thread=in_thread)(async_body if body == "async" else sync_body)
        await made.execute(
            {},
            ToolContext.for_test(emit=lambda event: seen.append(event.message), logger=logger, keep_write=seen.append),
        )
        assert [message for message in expected for _ in range(3)] == seen


@pytest.mark.parametrize("yields", [0, 2])
async def test_a_generator_that_does_not_yield_once_is_an_error(yields: int) -> None:
    def odd() -> Iterator[int]:
        yield from range(yields)

    @tool(in_thread=False)
    def body(x: int = Depends(odd)) -> int:
        return x

    result = await body.execute({}, ToolContext.for_test())
    assert result.is_error
    assert ("yielded nothing" if yields == 0 else "yielded again") in result.text


def test_a_factory_that_cannot_be_filled_in_is_refused() -> None:
    def needs(x: int) -> int:
        return x

    with pytest.raises(DefinitionError, match="parameter 'x'"):
        tool(name="t")(lambda v=Depends(needs): v)  # noqa: B008
    with pytest.raises(DefinitionError, match="not 3"):
        Depends(3)  # type: ignore[arg-type]


@pytest.mark.spec("requirements:E8")
def test_resources_are_filed_by_type() -> None:
    resources = ResourceMap([3, "x"])
    resources.insert(True, as_type=object)

    assert (3, "x", True, None) == (resources.get(int), resources.get(str), resources.get(object), resources.get(float))
    assert int in resources
    assert 3 == resources.remove(int)
    assert (None, None, 2) == (resources.get(int), resources.remove(int), len(resources))
