"""What a role wants done: messages to send and grammars to compile. The event loop empties it after every turn."""

from dataclasses import dataclass, field

from common.scheduling.grammar_queue import GrammarEffect
from common.wire.messages import Message, Peer


@dataclass(slots=True)
class Outbox:
    """Messages, each list in the order in which they must leave.

    Attributes:
        gateway: to the gateway.
        peers: (incarnation, message) to other nodes.
        dial: prefill nodes to connect to before ``peers`` leave.
        hang_up: incarnations whose connections are no longer needed.
        grammars: to compile, and no longer needed.
    """

    gateway: list[Message] = field(default_factory=list)
    peers: list[tuple[str, Message]] = field(default_factory=list)
    dial: list[Peer] = field(default_factory=list)
    hang_up: list[str] = field(default_factory=list)
    grammars: list[GrammarEffect] = field(default_factory=list)
