"""
An agent for an editor: the requests of the protocol about sessions, prompts and choices.

This module has the methods that the protocol calls. The execution of a turn belongs to ``session``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepengine.adapters.acp import prompts, servers
from stepengine.adapters.acp.editor import ConnectedEditor
from stepengine.adapters.acp.kept import SessionStorage, StoredSession
from stepengine.adapters.acp.protocol_errors import (
    INTERNAL,
    INVALID_PARAMS,
    MISSING_KEY,
    convert_to_protocol_errors,
    make_protocol_error,
)
from stepengine.adapters.acp.session import EditorSession
from stepengine.adapters.acp.session_engines import MakeEngine, SessionEngines
from stepengine.adapters.acp.session_options import MODE, MODEL, OfferedChoices
from stepengine.errors import InputError, MissingKey, StepEngineError
from stepengine.workspace.installed import get_installed_version

if TYPE_CHECKING:
    from acp import schema
    from acp.interfaces import Client

PAGE = 50
ENVIRONMENT = "environment"
NO_KEY = "Set the API key of the model provider in the environment of this agent, in the editor's settings, and restart the agent."


class EditorAgent:
    """
    An agent as the protocol's package calls it (``acp.run_agent``); ``serve`` runs one over stdin and stdout.

    Each prompt is a root run with its own journal, and continues from the state of the previous one. Tool calls that need a person's
    permission, and questions with options, are permission requests. A question with a free answer is a form if the editor supports
    forms; else it ends the turn, and the next prompt is the answer. Loading a session replays its journals: no model is called, and no
    tool runs.

    Args:
        make: Makes the engine of a session, which is closed with it.
        agent: The id of the agent.
        folder: The folder in which sessions are stored.
        mcp: Makes a source of tools from an MCP server of the editor: ``stepengine.adapters.mcp.mcp_tools``. Without it, these servers are
            not started, and a warning is shown.
        modes: The permission modes that can be chosen, the first one by default; *make* then accepts ``mode``.
        models: The models that can be chosen, the first one by default, ``""`` for those of the agents; *make* then accepts ``model``.

    Attributes:
        deletes: Whether ``ext_method`` receives ``session/delete``, as with ``serve``: the package has no route for it.

    Raises:
        DefinitionError: For an unknown mode, and for choices that *make* does not accept.
    """

    def __init__(
        self,
        make: MakeEngine,
        agent: str,
        folder: Path,
        *,
        mcp: servers.McpMaker | None = None,
        modes: Sequence[str] = (),
        models: Sequence[str] = (),
    ) -> None:
        self._offer = OfferedChoices(modes, models)
        self._engines = SessionEngines(make, agent, mcp, {MODE: modes, MODEL: models})
        self._kept = SessionStorage(folder)
        self._editor = ConnectedEditor()
        self._open: dict[str, EditorSession] = {}
        self._without_key = ""
        self.deletes = False

    def on_connect(self, conn: Client) -> None:
        """Store the client that runs are shown to."""
        self._editor.client = conn

    async def initialize(
        self, protocol_version: int, client_capabilities: Any = None, **_: object
    ) -> schema.InitializeResponse:
        """Negotiate the protocol version, and return the capabilities of this agent."""
        import acp
        from acp import schema

        self._editor.capabilities = client_capabilities
        sessions = schema.SessionCapabilities(
            list=schema.SessionListCapabilities(),
            delete=schema.SessionDeleteCapabilities() if self.deletes else None,
            fork=schema.SessionForkCapabilities(),
            resume=schema.SessionResumeCapabilities(),
            close=schema.SessionCloseCapabilities(),
        )
        return schema.InitializeResponse(
            # A version that is not known is answered by the newest that is, as the protocol has it.
            protocol_version=acp.PROTOCOL_VERSION,
            agent_capabilities=schema.AgentCapabilities(
                load_session=True,
                prompt_capabilities=schema.PromptCapabilities(embedded_context=True, image=True),
                mcp_capabilities=schema.McpCapabilities(http=self._engines.mcp is not None),
                session_capabilities=sessions,
            ),
            auth_methods=[
                schema.AuthMethodAgent(id=ENVIRONMENT, name="API key in the environment", description=NO_KEY)
            ],
            agent_info=schema.Implementation(
                name="stepengine",
                title=f"stepengine: {self._engines.agent_id}",
                version=get_installed_version("stepengine") or "0",
            ),
        )

    async def authenticate(self, method_id: str, **_: object) -> schema.AuthenticateResponse:
        """Raise an error for an unknown method, or if the last turn found no API key for its model; else report success."""
        from acp import schema

        if method_id != ENVIRONMENT:
            msg = f"unknown sign-in method {method_id!r:.80}; the only method is {ENVIRONMENT!r}"
            raise make_protocol_error(INVALID_PARAMS, msg)
        if self._without_key:
            raise make_protocol_error(MISSING_KEY, self._without_key)
        return schema.AuthenticateResponse()

    # --- sessions -----------------------------------------------------------------------------------------------------

    async def new_session(self, cwd: str, mcp_servers: Any = None, **_: object) -> schema.NewSessionResponse:
        """Create and open a session in a workspace, and return its id and choices."""
        from acp import schema

        with convert_to_protocol_errors():
            kept = self._kept.create_session(_validate_workspace_folder(cwd))
        session = await self._open_stored_session(kept, mcp_servers)
        return schema.NewSessionResponse(session_id=kept.id, **self._make_choice_fields(session))

    async def load_session(
        self, cwd: str, session_id: str, mcp_servers: Any = None, **_: object
    ) -> schema.LoadSessionResponse:
        """Reopen a stored session, show its turns in the editor, and return its choices."""
        from acp import schema

        session = await self._load_and_replay_session(
            session_id, _validate_workspace_folder(cwd), mcp_servers, shows_turns=True
        )
        return schema.LoadSessionResponse(**self._make_choice_fields(session))

    async def resume_session(
        self, cwd: str, session_id: str, mcp_servers: Any = None, **_: object
    ) -> schema.ResumeSessionResponse:
        """Reopen a stored session without showing its turns again, and return its choices."""
        from acp import schema

        session = await self._load_and_replay_session(
            session_id, _validate_workspace_folder(cwd), mcp_servers, shows_turns=False
        )
        return schema.ResumeSessionResponse(**self._make_choice_fields(session))

    async def fork_session(
        self, cwd: str, session_id: str, mcp_servers: Any = None, **_: object
    ) -> schema.ForkSessionResponse:
        """Copy a stored session with all its turns into a new one; raise an error while it has an unfinished turn."""
        from acp import schema

        folder = _validate_workspace_folder(cwd)
        with convert_to_protocol_errors():
            source = self._kept.load_session(session_id)
        running = self._open.get(session_id)
        if running is not None and (not running.free.is_set() or running.run is not None):
            msg = f"session {session_id!r} has an unfinished turn; fork it after the turn ends"
            raise make_protocol_error(INVALID_PARAMS, msg)
        with convert_to_protocol_errors():
            made = self._kept.copy_session(source, folder)
        session = await self._load_and_replay_session(made.id, folder, mcp_servers, shows_turns=False)
        return schema.ForkSessionResponse(session_id=made.id, **self._make_choice_fields(session))

    async def list_sessions(
        self, cwd: str | None = None, cursor: str | None = None, **_: object
    ) -> schema.ListSessionsResponse:
        """List the sessions of a workspace, the newest first, 50 per page."""
        from acp import schema

        if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < PAGE):
            msg = "unknown cursor; use nextCursor of an earlier reply to session/list"
            raise make_protocol_error(INVALID_PARAMS, msg)
        first = int(cursor or 0)
        found = self._kept.list_sessions(None if cwd is None else _validate_workspace_folder(cwd))
        infos = [
            schema.SessionInfo(session_id=each.id, cwd=str(each.cwd), title=each.title or None, updated_at=each.updated)
            for each in found[first : first + PAGE]
        ]
        following = str(first + PAGE) if len(found) > first + PAGE else None
        return schema.ListSessionsResponse(sessions=infos, next_cursor=following)

    async def close_session(self, session_id: str, **_: object) -> schema.CloseSessionResponse:
        """End the turn of a session, and close its engine. The session stays stored."""
        from acp import schema

        session = self._open.pop(session_id, None)
        if session is not None:
            await session.close()
        return schema.CloseSessionResponse()

    async def delete_session(self, session_id: str) -> None:
        """Close a session, and delete it with its journals; an unknown session counts as deleted."""
        await self.close_session(session_id)
        with convert_to_protocol_errors():
            self._kept.delete_session(session_id)

    async def ext_method(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Delete a session for ``session/delete``, which the protocol's package does not route; refuse every other method."""
        from acp import RequestError

        if method != "session/delete" or not self.deletes:
            raise RequestError.method_not_found("_" + method)
        session_id = params.get("sessionId")
        if not isinstance(session_id, str):
            msg = "sessionId must be the id of a session"
            raise make_protocol_error(INVALID_PARAMS, msg)
        await self.delete_session(session_id)
        return {}

    async def aclose(self) -> None:
        """Cancel the updates that are not sent yet, and close every session."""
        self._editor.cancel_pending_updates()
        for session_id in list(self._open):
            await self.close_session(session_id)

    async def _open_stored_session(self, stored: StoredSession, mcp_servers: Any) -> EditorSession:
        """Open a stored session in place of an open one with its id, and send its skill commands after the reply."""
        await self.close_session(stored.id)
        stored.chosen = self._offer.replace_unoffered_choices(stored.chosen)
        with convert_to_protocol_errors():
            session = EditorSession(self._editor, self._engines, stored)
            session.add_servers(mcp_servers)
        self._open[stored.id] = session
        self._editor.send_after_reply(session.send_skill_commands())
        return session

    async def _load_and_replay_session(
        self, session_id: str, cwd: Path, mcp_servers: Any, *, shows_turns: bool
    ) -> EditorSession:
        """Load a stored session, open it in the workspace *cwd*, and replay its turns; show them if *shows_turns*."""
        with convert_to_protocol_errors():
            kept = self._kept.load_session(session_id)
        kept.cwd = cwd
        session = await self._open_stored_session(kept, mcp_servers)
        await session.replay_turns(shows_turns=shows_turns)
        return session

    def _require_open_session(self, session_id: str) -> EditorSession:
        """Return an open session by its id; raise the protocol's error if it is not open."""
        session = self._open.get(session_id)
        if session is None:
            msg = f"session {session_id!r:.80} is not open; load it with session/load, or start one with session/new"
            raise make_protocol_error(INVALID_PARAMS, msg)
        return session

    # --- choices ------------------------------------------------------------------------------------------------------

    def _make_choice_fields(self, session: EditorSession) -> dict[str, Any]:
        """Return the ``modes`` and ``config_options`` of a session for a reply, without empty ones."""
        chosen = session.kept.chosen
        found = {
            "modes": self._offer.make_mode_state(chosen),
            "config_options": self._offer.make_config_options(chosen),
        }
        return {name: value for name, value in found.items() if value}

    async def set_session_mode(self, session_id: str, mode_id: str, **_: object) -> schema.SetSessionModeResponse:
        """Set and save the permission mode for the next turns, and send the new options after the reply."""
        from acp import schema

        session = self._require_open_session(session_id)
        self._validate_and_save_choice(session, MODE, mode_id)
        options = self._offer.make_config_options(session.kept.chosen)
        update = schema.ConfigOptionUpdate(session_update="config_option_update", config_options=options)
        self._editor.send_after_reply(session.send_update(update))
        return schema.SetSessionModeResponse()

    async def set_config_option(
        self, config_id: str, session_id: str, value: object, **_: object
    ) -> schema.SetSessionConfigOptionResponse:
        """Set and save the mode or model for the next turns, and return all options; a new mode is also sent."""
        from acp import schema

        session = self._require_open_session(session_id)
        self._validate_and_save_choice(session, config_id, value)
        if config_id == MODE:
            mode = session.kept.chosen.mode
            update = schema.CurrentModeUpdate(session_update="current_mode_update", current_mode_id=mode)
            self._editor.send_after_reply(session.send_update(update))
        return schema.SetSessionConfigOptionResponse(
            config_options=self._offer.make_config_options(session.kept.chosen)
        )

    def _validate_and_save_choice(self, session: EditorSession, option: str, value: object) -> None:
        """Save the mode or model that a person chose for a session; raise the protocol's error for an invalid one."""
        chosen = self._offer.with_option_value(session.kept.chosen, option, value)
        if chosen is None:
            msg = f"{value!r:.80} is not a valid value for {option!r:.80}; session/new returns the valid options and values"
            raise make_protocol_error(INVALID_PARAMS, msg)
        if chosen.model != session.kept.chosen.model:
            self._without_key = ""  # the next turn looks up the key of the new model
        session.kept.chosen = chosen
        with convert_to_protocol_errors():
            session.kept.save()

    # --- turns --------------------------------------------------------------------------------------------------------

    async def prompt(self, session_id: str, prompt: list[Any], **_: Any) -> schema.PromptResponse:
        """
        Start a run, or answer or resume the current one, and show it until it ends or asks for text.

        If the last turn was cancelled, wait for its end first.
        """
        with convert_to_protocol_errors():
            said = prompts.parse_prompt(prompt)
        session = await self._wait_for_idle_session(session_id)
        self._without_key = ""
        try:
            return await session.run_turn(said)
        except MissingKey as error:
            self._without_key = error.message
            raise make_protocol_error(MISSING_KEY, error.message) from None
        except InputError as error:
            raise make_protocol_error(INVALID_PARAMS, error.message) from None
        except StepEngineError as error:
            raise make_protocol_error(INTERNAL, error.message) from None

    async def cancel(self, session_id: str, **_: object) -> None:
        """Cancel the turn of a session and its open question."""
        session = self._open.get(session_id)
        if session is not None:
            await session.cancel()

    async def _wait_for_idle_session(self, session_id: str) -> EditorSession:
        """Return an idle session, after waiting for the end of a cancelled turn; raise an error if it is running or broken."""
        session = self._require_open_session(session_id)
        while not session.free.is_set() and session.is_given_up:
            await session.free.wait()
            session = self._require_open_session(session_id)
        if not session.free.is_set():
            msg = f"session {session_id!r} is running a turn; cancel the turn, or wait for its end"
            raise make_protocol_error(INVALID_PARAMS, msg)
        session.raise_if_broken()
        return session


def _validate_workspace_folder(cwd: str) -> Path:
    """Return the path of a workspace; raise the protocol's error unless it is absolute and an existing folder."""
    path = Path(cwd)
    if not (path.is_absolute() and path.is_dir()):
        msg = f"cwd must be the absolute path of an existing folder, not {cwd!r:.200}"
        raise make_protocol_error(INVALID_PARAMS, msg)
    return path
