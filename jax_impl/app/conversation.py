"""What was said so far, and as which token ids the model reads it (CHAT-2)."""

from __future__ import annotations

from typing import Any

from jax_impl.app.chat_template import Renderer
from jax_impl.app.text import Text


class Conversation:
    """Turns of a chat. With a `renderer` they are messages of the model's own template; without one
    they are plain text that the model continues.

    system   said before the first turn, also after a reset
    more     what else the template shall see
    """

    def __init__(
        self,
        text: Text,
        renderer: Renderer | None,
        system: str = "",
        more: dict[str, Any] | None = None,
    ) -> None:
        self._text, self._renderer, self._system = text, renderer, system
        self._more = more or {}
        self.turns: list[tuple[str, str]] = []

    def reset(self) -> None:
        """Forget every turn."""
        self.turns.clear()

    def prompt(self, said: str) -> tuple[int, ...]:
        """Token ids of everything up to the answer to `said`. Raises BadInput (TEXT-9)."""
        if self._renderer is None:
            lines = [self._system] if self._system else []
            lines += [asked + answered for asked, answered in self.turns]
            return self._text.encode("\n".join([*lines, said]), "chat")
        messages = [{"role": "system", "content": self._system}] if self._system else []
        for asked, answered in self.turns:
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": answered})
        messages.append({"role": "user", "content": said})
        rendered = self._renderer.render(messages, **self._more)
        return self._text.encode_rendered(rendered, "chat")

    def add(self, said: str, answered: str) -> None:
        """The turn is over; what was answered, also in part, belongs to the conversation."""
        self.turns.append((said, answered))
