"""
A container that is kept: created on first use, found again later, saved as an image, removed.

This module must not know the programs in the container.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping

from attrs import frozen

from stepengine.data.visible import visible
from stepengine.errors import WorkspaceLost

LABEL = "stepengine.workspace"
CONTAINER_SECONDS = 60.0
"""Starting or saving a container takes seconds, on a busy machine longer; a daemon that hangs must not block a run."""
SAID_CHARS = 500
"""The last lines contain the error."""
FACTS = f'{{{{.State.Running}}}} {{{{index .Config.Labels "{LABEL}"}}}}'
"""The queried facts of a container, as a template of Docker."""


@frozen
class Container:
    """
    A named container of Docker or Podman.

    Attributes:
        program: ``docker`` or ``podman``.
        name: Its name.
        env: The environment variables of the program.
        words: The arguments of ``run`` that create it; empty for a container that someone else created.
        start: The time limit in seconds for its creation, with the download of the image.
    """

    program: str
    name: str
    env: Mapping[str, str]
    words: tuple[str, ...] = ()
    start: float = CONTAINER_SECONDS

    @property
    def _options_hash(self) -> str:
        """The hash of the arguments that created the container, stored as its label."""
        return hashlib.sha256("\0".join(self.words).encode()).hexdigest()[:24]

    def ensure_started(self) -> None:
        """
        Start the container, and create it if it does not exist. An existing container is not changed.

        Raises:
            WorkspaceLost: when it cannot start, or one of this name was created with other options.
        """
        if not self.words or self._start_if_exists():
            return
        made = self._run_program(
            "run",
            "--detach",
            "--stop-timeout=1",
            f"--name={self.name}",
            f"--label={LABEL}={self._options_hash}",
            *self.words,
            seconds=self.start,
        )
        # Another process may have made it in the meantime.
        if made.returncode and not self._start_if_exists():
            self._raise_lost("could not be created", made.stderr)

    def _start_if_exists(self) -> bool:
        """Start the container if it is stopped, and return True; False if it does not exist. Raise ``WorkspaceLost`` for other options."""
        found = self._run_program("container", "inspect", f"--format={FACTS}", self.name)
        if found.returncode:
            return False
        running, _, mark = found.stdout.decode("utf-8", "replace").strip().partition(" ")
        if mark != self._options_hash:
            msg = (
                f"the container {self.name!r} exists, but it was created from another image or with other options; "
                f"pass another name as keep=, or remove it: {self.program} rm -f {self.name}"
            )
            raise WorkspaceLost(msg)
        if running != "true":
            started = self._run_program("start", self.name)
            if started.returncode:
                self._raise_lost("could not be started again", started.stderr)
        return True

    def commit(self, image: str) -> None:
        """
        Start the container if necessary, and create an image of its content, without its mounts.

        Raises:
            WorkspaceLost: when this fails.
        """
        self.ensure_started()
        made = self._run_program("commit", self.name, image, seconds=max(self.start, CONTAINER_SECONDS))
        if made.returncode:
            self._raise_lost(f"could not be committed to the image {image!r}", made.stderr)

    def remove(self) -> None:
        """
        Remove the container with its content; a container that was passed by name is not removed.

        Raises:
            WorkspaceLost: when this fails.
        """
        if self.words and self._run_program("container", "inspect", self.name).returncode == 0:
            self._start_if_exists()  # raises for a container that another program created
            removed = self._run_program("rm", "--force", self.name)
            if removed.returncode:
                self._raise_lost("could not be removed", removed.stderr)

    def _run_program(self, *words: str, seconds: float = CONTAINER_SECONDS) -> subprocess.CompletedProcess[bytes]:
        """Run the container program and return its result; raise ``WorkspaceLost`` if it cannot start or takes too long."""
        command = [self.program, *words]
        try:
            return subprocess.run(  # noqa: S603  (an argument list; no shell reads it)
                command, stdin=subprocess.DEVNULL, capture_output=True, check=False, env=dict(self.env), timeout=seconds
            )
        except subprocess.TimeoutExpired:
            msg = f"{self.program} {words[0]} did not finish within {seconds:g} s for the container {self.name!r}"
            raise WorkspaceLost(msg) from None
        except OSError as error:
            msg = f"{self.program} cannot be started: {error.strerror}; is it installed?"
            raise WorkspaceLost(msg) from None

    def _raise_lost(self, problem: str, output: bytes) -> None:
        """Raise ``WorkspaceLost`` with the problem and the last output of the program."""
        text = visible(output.decode("utf-8", "replace").strip()[-SAID_CHARS:])
        msg = f"the container {self.name!r} {problem}: {text}"
        raise WorkspaceLost(msg)
