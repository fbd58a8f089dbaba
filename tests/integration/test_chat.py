"""`tandem chat` on a real terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from typing import Any


class Terminal:
    """A pseudo-terminal with `tandem chat` in it."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(command, env=environment, preexec_fn=lambda: os.login_tty(theirs), pass_fds=[theirs])
        os.close(theirs)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def expect(self, text: str, deadline_s: float = 30.0) -> None:
        """Read until this appears after what was expected before."""
        end = time.monotonic() + deadline_s
        while text not in self.seen:
            readable, _, _ = select.select([self._ours], [], [], max(0.0, end - time.monotonic()))
            assert readable, f"{text!r} did not come; seen: {self.seen!r}"
            self.seen += os.read(self._ours, 4096).decode(errors="replace")
        self.seen = self.seen.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_a_conversation_and_a_stopped_answer(cluster: Any, tandem: str) -> None:
    environment = dict(os.environ) | {"TANDEM_URL": cluster.url, "TERM": "dumb", "COLUMNS": "120"}
    terminal = Terminal([tandem, "chat", "--temperature", "0"], environment)
    try:
        terminal.expect("> ")
        terminal.type("Name the capital of France.\n")
        terminal.expect("Paris")
        terminal.expect("tokens/s")
        terminal.expect("> ")
        terminal.type("Write a very long story about a cat and a dog.\n")
        terminal.expect("story about a cat and a dog.\r\n")
        terminal.expect(" ")
        terminal.type("\x03")
        terminal.expect("(stopped)")
        cluster.until(cluster.clean, 10)
        terminal.expect("> ")
        terminal.type("\x03")
        terminal.expect("/exit leaves")
        terminal.type("/exit\n")
        assert terminal.process.wait(timeout=10) == 0
    finally:
        terminal.close()
