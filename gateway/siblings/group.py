"""The gateways of one ``serve --workers N``, which share a port: their addresses, and which owns what. Pure."""

import zlib
from dataclasses import dataclass

from common.config.gateway import GROUP
from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GatewayGroup:
    """The place of one gateway among its siblings.

    Attributes:
        name: random, the same for all of them.
        index: the number of this gateway, from 0 on. A gateway that is started again keeps it.
        count: how many there are.
    """

    name: str
    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.name}:{self.index}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> "GatewayGroup":
        """Raises ConfigError: the text is not NAME:INDEX/COUNT."""
        found = GROUP.fullmatch(text)
        if found is None or int(found[2]) >= int(found[3]):
            raise ConfigError(f"--group must be NAME:INDEX/COUNT with an INDEX below COUNT, not {text!r}")
        return cls(found[1], int(found[2]), int(found[3]))

    @property
    def others(self) -> list[int]:
        """The siblings, beginning after this one, so that not all begin with the same."""
        return [(self.index + step) % self.count for step in range(1, self.count)]

    def address(self, index: int) -> str:
        """Abstract address of the Unix socket of a gateway. It ends with its process and leaves no file."""
        return f"\0baton-{self.name}-{index}"

    def home(self, kind: str, key: str) -> int:
        """The gateway that takes all requests of a tenant, or all with one key."""
        return zlib.crc32(f"{kind}\0{key}".encode(errors="surrogateescape")) % self.count
