"""What a template is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..types import Conversation, Rendered


class Template(Protocol):
    """How a model's conversations are written down."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str:
        """Versioned digest (``b3:…``) of everything that decides the rendering."""

    @property
    def roles(self) -> Sequence[str]:
        """The roles that conversations may have here."""

    def render(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Rendered:
        """The complete prompt for a valid conversation.

        ``continue_final_message``: end inside the assistant's last message, for the model to go on with it,
        instead of with the generation prompt.

        Raises:
            ConversationError: the last message cannot be continued, or a rule refuses a message.
            TemplateError: the template cannot express this conversation.
        """
