"""What a template is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..types import Conversation, Rendered, Segment


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

    def locate(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Rendered:
        """What :meth:`render` gives, cut into segments that say which message they are of, if that is known.

        It may take several renderings: for who asks where a prompt's tokens come from.
        """


@dataclass(frozen=True, slots=True)
class Growth:
    """A complete prompt, or what follows the settled part of an earlier one.

    Settled is what every prompt begins with whose conversation begins with this one; it ends with a marker.

    Attributes:
        segments: the prompt's, or where ``goes_on``, those after the earlier prompt's settled part.
        goes_on: whether the earlier one could be gone on from.
        num_settled: so many of ``segments`` are settled, too.
        state: to go on from here; ``None`` where that cannot be.
    """

    segments: tuple[Segment, ...]
    goes_on: bool = False
    num_settled: int = 0
    state: object | None = None


@runtime_checkable
class GrowingTemplate(Template, Protocol):
    """A template that may not need to render again what it has rendered."""

    def render_on(self, conversation: Conversation, state: object | None) -> Growth:
        """:meth:`render` with a generation prompt, going on from an earlier rendering if that can be.

        Args:
            conversation: a valid one. With a ``state`` it has the tools of that rendering, and begins with
                its messages.
            state: what :meth:`render_on` of this template gave.

        Raises:
            TemplateError: as :meth:`render` would.
        """
