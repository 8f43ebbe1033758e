"""The registry ``Models``, which finds the provider for a model string."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from functools import lru_cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from stepengine.data.alike import MAX_SUGGESTIONS, did_you_mean, list_names
from stepengine.data.models import ModelDelta, ModelReply, ModelRequest, ReplyDone
from stepengine.errors import DefinitionError, ModelError, StepEngineError, UnknownModel
from stepengine.models.base import ModelInfo, ModelRef, Provider
from stepengine.models.routing import Fallback, parse_route

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

ENTRY_POINTS = "stepengine.models"
"""The entry-point group: the name of an entry is a prefix, and its object creates a provider."""

OPENROUTER = "openrouter"
ALIKE = 0.75
"""The least similarity of a suggested provider name, if OpenRouter is also suggested."""

ProviderSource: TypeAlias = Provider | Callable[[], Provider]
"""A provider, or a function without arguments that creates one on first use."""


@lru_cache(maxsize=4)
def _load_provider_entry_points(search_path: tuple[str, ...]) -> EntryPoints:  # noqa: ARG001 - it is the key of the cache
    """Return the entry points of installed providers, cached by *search_path*, the value of ``sys.path``."""
    from importlib.metadata import entry_points

    return entry_points(group=ENTRY_POINTS)


def _create_installed_provider(entry: EntryPoint) -> Provider:
    """
    Load an entry point, and return the provider that it creates; raise ``ModelError`` if that fails.

    Raises:
        ModelError: when the entry point fails or does not create a provider.
    """
    try:
        provider = entry.load()()
    except ModelError:
        raise
    except Exception as error:
        raise _make_entry_point_error(entry, f"{type(error).__name__}: {error}") from error
    if not isinstance(provider, Provider):
        raise _make_entry_point_error(entry, f"it returned {provider!r}")
    return provider


def _make_entry_point_error(entry: EntryPoint, reason: str) -> ModelError:
    """Return the error for an entry point that did not create a provider."""
    msg = (
        f"the entry point {entry.name!r} of the group {ENTRY_POINTS!r} created no provider: {reason}. It must create "
        f"a Provider without arguments; in its package, replace {entry.value!r} by a class or function that does"
    )
    return ModelError(msg, kind="settings")


def _make_provider_factory(location: str, *arguments: str, **options: str) -> Callable[[], Provider]:
    """Return a function that imports the provider class at *location* (``module:Class``) and creates a provider with the arguments."""

    def create_provider() -> Provider:
        """Import the provider class, and return a new provider."""
        module, _, name = location.partition(":")
        provider: Provider = getattr(import_module(f"stepengine.models.{module}"), name)(*arguments, **options)
        return provider

    return create_provider


def _make_standard_sources() -> dict[str, ProviderSource]:
    """Return the sources of the package's own adapters; called on first use, because creating all presets takes 2 ms."""
    from stepengine.models.presets import PRESETS

    found = {
        "anthropic": _make_provider_factory("anthropic:AnthropicProvider"),
        "google": _make_provider_factory("google:GoogleProvider"),
    }
    for name, preset in PRESETS.items():
        if preset.adapter == "openai":
            found[name] = _make_provider_factory("openai:OpenAIProvider", name=name)
        else:
            found[name] = _make_provider_factory("openai_chat:OpenAIChatProvider", name)
    return {
        **found,
        "google_interactions": _make_provider_factory("google.interactions:GoogleInteractionsProvider"),
        "bedrock": _make_provider_factory("clouds:BedrockProvider"),
        "bedrock_mantle": _make_provider_factory("clouds:BedrockProvider", name="bedrock_mantle", endpoint="mantle"),
        "bedrock_converse": _make_provider_factory(
            "clouds:BedrockProvider", name="bedrock_converse", endpoint="converse"
        ),
        "vertex": _make_provider_factory("clouds:VertexProvider"),
        "foundry": _make_provider_factory("clouds:FoundryProvider"),
        "anthropic_aws": _make_provider_factory("clouds:AnthropicAwsProvider"),
        "anthropic_google": _make_provider_factory("clouds:AnthropicGoogleProvider"),
    }


@lru_cache(maxsize=1)
def _list_standard_prefixes() -> frozenset[str]:
    """Return the prefixes of the package's own adapters, cached because creating all presets is slow."""
    return frozenset(_make_standard_sources())


class Models:
    """
    The registered providers, with a lookup by model string.

    A model string is ``provider/model``; the longest registered prefix is the provider. ``provider:model`` is accepted and
    normalised. A string without a provider is matched against the providers' ``model_patterns``, and exactly one must
    match. ``"a/x | b/y"`` calls the second model when the first fails (``fallback``).

    Three lines register your own provider::

        models = Models.standard()
        models.register("mine", MyProvider)
        engine = Engine(models=models)

    Args:
        providers: Providers by prefix, or functions that create them.
        aliases: Short names, such as ``{"default": "anthropic/claude-sonnet-5"}``; an alias may name another one.
        info: The caller's data about models, by model string, which replace the package's data.
        discover: Whether installed packages may add providers, through the entry-point group ``stepengine.models``. They
            are loaded for an unknown prefix, and never replace a known one.

    Attributes:
        aliases: The aliases.
        is_for_run: Whether ``for_run`` created it, so that its provider has not answered any request before.
    """

    def __init__(
        self,
        providers: Mapping[str, ProviderSource] | None = None,
        *,
        aliases: Mapping[str, str] | None = None,
        info: Mapping[str, ModelInfo] | None = None,
        discover: bool = False,
    ) -> None:
        if not isinstance(providers, Mapping | None):
            msg = f"Models expects providers by prefix, such as Models({{'acme': provider}}), not {providers!r}"
            raise DefinitionError(msg)
        self._discover = discover
        self.aliases: dict[str, str] = dict(aliases or {})
        self._known: dict[str, ProviderSource] = {}
        self._late: Callable[[], dict[str, ProviderSource]] | None = None
        self._providers: dict[str, Provider] = {}
        self._only: Provider | None = None
        self.is_for_run = False
        self._served: dict[str, Provider] = {}
        self._info = dict(info or {})
        for prefix, provider in (providers or {}).items():
            self.register(prefix, provider)

    @property
    def _sources(self) -> dict[str, ProviderSource]:
        """The sources of providers by prefix; registered providers replace the package's own."""
        late = self._late
        if late is not None:
            # In this order, because another thread could otherwise miss the package's own.
            self._known = {**late(), **self._known}
            self._late = None
        return self._known

    def __repr__(self) -> str:
        return f"<Models of {', '.join(self.providers) or 'no providers'}>"

    @property
    def providers(self) -> tuple[str, ...]:
        """The registered prefixes, in order, those of installed packages last."""
        self._register_installed_providers()
        return tuple(self._sources) if self._only is None else (self._only.name,)

    @property
    def default_model(self) -> str | None:
        """The ``default_model`` of the only provider; ``None`` if there are several."""
        return None if self._only is None else self._only.default_model

    @classmethod
    def standard(
        cls,
        *,
        aliases: Mapping[str, str] | None = None,
        info: Mapping[str, ModelInfo] | None = None,
    ) -> Models:
        """
        Return a registry of the package's own adapters with keys and base URLs from the environment.

        Prefixes: ``anthropic``, ``openai`` (Responses), ``google`` and ``google_interactions``, ``openai_chat`` (Chat
        Completions), the services of
        ``stepengine.models.PRESETS``, and the clouds ``bedrock``, ``bedrock_mantle``, ``bedrock_converse``, ``vertex``, ``foundry``,
        ``anthropic_aws`` and ``anthropic_google``. Nothing is read or imported before a provider is first used.
        """
        models = cls(aliases=aliases, info=info, discover=True)
        models._late = _make_standard_sources
        return models

    @classmethod
    def from_value(cls, value: Models | Provider | Mapping[str, ProviderSource] | None) -> Models:
        """
        Return *value* as a registry: ``None`` is ``standard()``, and a provider serves every model string.

        Raises:
            UnknownModel: for a value of another type.
        """
        if value is None:
            return cls.standard()
        if isinstance(value, Models):
            return value
        if isinstance(value, Provider):
            models = cls()
            models._only = value
            return models
        if isinstance(value, Mapping):
            return cls(value)
        msg = f"models must be a Provider, a mapping from prefix to Provider, a Models or None, not a {type(value).__name__}"
        raise UnknownModel(msg)

    def for_run(self) -> Models:
        """Return the registry for one run: this one, unless its only provider returns a separate provider for each run."""
        own = None if self._only is None else self._only.for_run()
        if own is self._only:
            return self
        made = Models.from_value(own)
        # Model data that one run queried are also known to the next.
        made.aliases, made._info, made._served = self.aliases, self._info, self._served  # noqa: SLF001 - one of this class
        made.is_for_run = True
        return made

    def register(self, prefix: str, provider: ProviderSource) -> None:
        """
        Register *provider* for model strings with *prefix*; it replaces an earlier one.

        A prefix may have slashes: ``"openrouter/anthropic"`` replaces ``"openrouter"`` for some models.

        Raises:
            UnknownModel: for an invalid prefix or provider.
        """
        if not prefix.strip("/") or prefix != prefix.strip("/ ") or ":" in prefix or "|" in prefix:
            msg = f"{prefix!r} is not a provider prefix; use a name without ':' and '|' that neither starts nor ends with '/'"
            raise UnknownModel(msg)
        if not isinstance(provider, Provider) and not callable(provider):
            msg = f"the provider of {prefix!r} must be a Provider, or a function that creates one, not {provider!r}"
            raise UnknownModel(msg)
        self._known[prefix] = provider
        self._providers.pop(prefix, None)

    def serve(self, model: str, provider: Provider) -> None:
        """
        Register *provider* for exactly the model string *model*, regardless of its prefix, or for each model of a fallback.

        So another server can serve a model under the server's own name, such as ``"openai/gpt-oss-20b"``. All other model
        strings are unaffected.
        """
        route = parse_route(model.strip())
        for name in (model,) if route is None else route.models:
            self._served[name.strip()] = provider

    def parse(self, model: str) -> ModelRef:
        """
        Parse *model* after resolving aliases; ``str()`` of the result is the canonical model string.

        Raises:
            UnknownModel: when no or several providers match, or *model* is empty.
        """
        model = self._resolve_alias(model)
        if not model:
            msg = f"no model is set: name one as 'provider/model', with one of the providers {self._format_provider_names()}"
            raise UnknownModel(msg, kind="unknown_model")
        route = parse_route(model)
        if route is not None:
            return ModelRef(
                "", str(attrs.evolve(route, models=tuple([str(self.parse(name)) for name in route.models])))
            )
        prefix, separator, rest = _split_prefix(model)
        if model in self._served:
            return ModelRef(prefix, rest) if separator == "/" else ModelRef("", model)
        if self._only is not None:
            # A colon may be part of the model's own name, such as "llama3.2:3b", so it only separates a known prefix.
            is_split = separator == "/" or prefix == self._only.name or prefix in _list_standard_prefixes()
            return ModelRef(prefix, rest) if rest and is_split else ModelRef(self._only.name, model)
        if separator and rest:
            found = self._match_longest_prefix(prefix, rest)
            if found is not None:
                return found
        if separator == "/":
            raise self._make_unknown_provider_error(model, prefix)
        return self._resolve_by_model_patterns(model)

    def _match_longest_prefix(self, prefix: str, rest: str) -> ModelRef | None:
        """Return the reference with the longest registered prefix of a model string; ``None`` if no prefix matches."""
        if prefix not in self._sources:
            self._register_installed_providers()
        plain = f"{prefix}/{rest}"
        fits = [known for known in self._sources if plain.startswith(f"{known}/") and len(plain) > len(known) + 1]
        if not fits:
            return None
        known = max(fits, key=len)
        return ModelRef(known, plain[len(known) + 1 :])

    def _register_installed_providers(self) -> None:
        """Add the providers of installed packages, once."""
        if not self._discover:
            return
        self._discover = False
        for entry in _load_provider_entry_points(tuple(sys.path)):
            if entry.name not in self._sources:
                self.register(entry.name, partial(_create_installed_provider, entry))

    def provider_for(self, model: str) -> Provider:
        """
        Return the provider of *model*, created on first use; for an alias, a provider that requests the alias's model.

        Raises:
            UnknownModel: when no or several providers match, or *model* is empty.
        """
        return self._resolve_provider(model, self.parse(model))

    def _resolve_provider(self, model: str, ref: ModelRef) -> Provider:
        """Return the provider for a parsed model string: the provider served for exactly this string, a fallback, or that of the prefix."""
        provider = self._served.get(str(ref))
        if provider is None:
            route = None if ref.provider else parse_route(ref.model)
            if route is not None:
                return Fallback(route, self.provider_for)
            provider = self._only if self._only is not None else self._get_or_create_provider(ref.provider)
        return _FixedModelProvider(provider, str(ref)) if model in self.aliases and ref.provider else provider

    def check(self, model: str) -> str:
        """
        Return the canonical model string; raise an error if requests for *model* cannot succeed.

        Raises:
            UnknownModel: when no or several providers match.
            MissingKey: when the provider has no key.
        """
        ref = self.parse(model)
        canonical = str(ref)
        self._resolve_provider(model, ref).check(canonical)
        return canonical

    def info(self, model: str) -> ModelInfo:
        """Return the limits and options of *model* without a request, from the caller's data, else from the package's."""
        given = self._info.get(model)
        if given is not None:
            return given
        canonical = str(self.parse(model))
        given = self._info.get(canonical)
        if given is not None:
            return given
        route = parse_route(canonical)
        if route is not None:
            return _combine_smallest_limits([self.info(name) for name in route.models])
        from stepengine.models.anthropic.families import get_family
        from stepengine.models.pricing import get_model_info

        known, name = get_model_info(canonical), canonical.rpartition("/")[2]
        return attrs.evolve(known, max_output=get_family(name).max_output) if "claude-" in name else known

    def output_limit(self, request: ModelRequest) -> int | None:
        """
        Return the largest number of tokens of a reply to *request*; ``None`` if there is no bound.

        The bound is the limit that is sent with the request, else the model's largest output. With server tools or the
        provider's own fallback models there is no bound.
        """
        settings = request.settings
        if settings.server_tools or settings.fallbacks:
            return None
        if settings.max_tokens is not None:
            return settings.max_tokens
        try:
            route = parse_route(str(self.parse(request.model)))
            if route is not None:
                limits = [self.output_limit(attrs.evolve(request, model=name)) for name in route.models]
                return None if None in limits else max(filter(None, limits), default=None)
            sent = self.provider_for(request.model).output_limit(request)
            return self.info(request.model).max_output if sent is None else sent
        except StepEngineError:  # the call itself will raise it
            return None

    async def ask(self, model: str) -> ModelInfo:
        """
        Query the provider for the limits and options of *model*, and return them completed by known data.

        ``info`` returns the same from then on.

        Raises:
            UnknownModel: when no or several providers match, or *model* is empty.
            ModelError: when the query fails.
        """
        ref = self.parse(model)
        known, stated = self.info(model), None
        if ref.provider or str(ref) in self._served:
            stated = await self._resolve_provider(model, ref).describe(str(ref))
        if stated is None:
            return known
        known = attrs.evolve(
            stated,
            context_window=stated.context_window or known.context_window,
            max_output=stated.max_output or known.max_output,
        )
        self._info[str(ref)] = known
        return known

    async def close(self) -> None:
        """Close every provider that was used, even if closing another one fails."""
        async with AsyncExitStack() as stack:
            for provider in {*self._providers.values(), *self._served.values(), *([self._only] if self._only else [])}:
                stack.push_async_callback(provider.close)

    def _get_or_create_provider(self, prefix: str) -> Provider:
        """Return the provider of a registered *prefix*, created at the first call."""
        provider = self._providers.get(prefix)
        if provider is None:
            source = self._sources[prefix]
            provider = source if isinstance(source, Provider) else source()
            provider.add_prefix(prefix)
            self._providers[prefix] = provider
        return provider

    def _resolve_alias(self, model: str) -> str:
        """Return the model string behind an alias, or *model* itself; raise ``UnknownModel`` for a cycle."""
        seen: list[str] = []
        while model in self.aliases:
            if model in seen:
                msg = f"the model aliases {' -> '.join([*seen, model])!r} form a cycle; remove one of them"
                raise UnknownModel(msg, kind="unknown_model")
            seen.append(model)
            model = self.aliases[model]
        return model.strip()

    def _format_provider_names(self) -> str:
        """Return the registered providers as text for a message."""
        listed = list_names(self.providers, quoted=True, none="(none is registered)")
        return f"{listed} (`stepengine agents models` lists them)" if len(self.providers) > MAX_SUGGESTIONS else listed

    def _resolve_by_model_patterns(self, model: str) -> ModelRef:
        """Return the reference to the only provider with a matching pattern; raise ``UnknownModel`` for none or several."""
        found, failed = list[str](), list[str]()
        for prefix in self._sources:
            try:
                if self._get_or_create_provider(prefix).supports_model(model):
                    found.append(prefix)
            except Exception as error:  # noqa: BLE001 - a provider that cannot be created concerns only its own models
                failed.append(f"{prefix!r} ({error})")
        if len(found) == 1:
            return ModelRef(found[0], model)
        if found:
            choices = list_names([f"{prefix}/{model}" for prefix in found], quoted=True)
            msg = f"the model {model!r} matches several providers; write one of {choices}"
            raise UnknownModel(msg, kind="unknown_model")
        near = self._suggest_openrouter_name(model) or self._suggest_names(model)
        msg = f"no provider is known for the model {model!r}; write 'provider/model' with one of the providers {self._format_provider_names()}{near}"
        if failed:
            msg += f"; some providers could not be searched: {', '.join(failed)}"
        raise UnknownModel(msg, kind="unknown_model")

    def _make_unknown_provider_error(self, model: str, prefix: str) -> UnknownModel:
        """Return the error for an unregistered prefix, with suggestions."""
        elsewhere = self._suggest_openrouter_name(model)
        near = self._suggest_names(prefix, ALIKE) if elsewhere else self._suggest_names(prefix)
        known = self._format_provider_names()
        msg = f"unknown provider {prefix!r} of the model {model!r}; registered providers: {known}{elsewhere}{near}"
        return UnknownModel(msg, kind="unknown_model")

    def _suggest_names(self, word: str, min_similarity: float = 0.6) -> str:
        """Return a clause with the providers and aliases that are similar to *word*; ``""`` if there are none."""
        return did_you_mean(word, [*self.providers, *self.aliases], min_similarity=min_similarity)

    def _suggest_openrouter_name(self, model: str) -> str:
        """Return a clause with the model string at OpenRouter; ``""`` if OpenRouter does not list *model*."""
        if OPENROUTER not in self.providers:
            return ""
        from stepengine.models.pricing import find_listed_family_and_name

        found = find_listed_family_and_name(OPENROUTER, model)
        return f"; OpenRouter offers models of {found[0]!r}: write '{OPENROUTER}/{'/'.join(found)}'" if found else ""


def _combine_smallest_limits(infos: list[ModelInfo]) -> ModelInfo:
    """Return the smallest limits of all models of a fallback; a limit is ``None`` if one of the models has no known limit."""
    windows, outputs = [i.context_window for i in infos], [i.max_output for i in infos]
    return ModelInfo(
        context_window=None if None in windows else min(filter(None, windows), default=None),
        max_output=None if None in outputs else min(filter(None, outputs), default=None),
    )


class _FixedModelProvider(Provider):
    """A provider wrapper that replaces the model of every request with one fixed model."""

    def __init__(self, provider: Provider, model: str) -> None:
        self.name = provider.name
        self._provider = provider
        self._model = model

    def check(self, model: str) -> None:
        self._provider.check(self._model)

    def get_account(self) -> str:
        return self._provider.get_account()

    async def describe(self, model: str) -> ModelInfo | None:
        return await self._provider.describe(self._model)

    async def upload(self, data: bytes, *, mime_type: str, name: str = "", expires_in: int | None = None) -> str:
        """Upload a file to the provider, and return its id."""
        return await self._provider.upload(data, mime_type=mime_type, name=name, expires_in=expires_in)

    async def delete_file(self, file_id: str) -> None:
        await self._provider.delete_file(file_id)

    def output_limit(self, request: ModelRequest) -> int | None:
        return self._provider.output_limit(attrs.evolve(request, model=self._model))

    def skip_reply(self, request: ModelRequest) -> None:
        """Notify the provider of a *request* that a test's record answers."""
        self._provider.skip_reply(attrs.evolve(request, model=self._model))

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """Query the provider for the number of tokens in *request* for the fixed model."""
        return await self._provider.count_tokens(attrs.evolve(request, model=self._model))

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Return the fixed model's reply to *request*."""
        return self._with_fixed_model_if_unnamed(
            await self._provider.complete(attrs.evolve(request, model=self._model))
        )

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """Yield the fixed model's reply in pieces, and last one ``ReplyDone``."""
        inner: Any = self._provider.stream(attrs.evolve(request, model=self._model))
        async with aclosing(inner) as deltas:
            async for delta in deltas:
                yield (
                    ReplyDone(self._with_fixed_model_if_unnamed(delta.reply)) if isinstance(delta, ReplyDone) else delta
                )

    def _with_fixed_model_if_unnamed(self, reply: ModelReply) -> ModelReply:
        """Return *reply* with the fixed model as its model, if the reply names no model."""
        return reply if reply.model is not None else attrs.evolve(reply, model=self._model)


def _split_prefix(model: str) -> tuple[str, str, str]:
    """Split a model string at the first slash or colon, and return (prefix, separator, rest); without both, (model, "", "")."""
    slash, colon = model.find("/"), model.find(":")
    at = max(slash, colon) if slash < 0 or colon < 0 else min(slash, colon)
    return (model, "", "") if at < 0 else (model[:at], model[at], model[at + 1 :])
