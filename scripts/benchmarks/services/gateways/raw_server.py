"""The limit of one process: a uvloop protocol that parses nothing and answers every request with the same bytes.

A request for a stream gets a chunk for each ``+`` that follows it on its connection. Run with a port as argument.
"""

import asyncio
import sys
from typing import cast

import uvloop

from scripts.benchmarks.services.gateways.mock_worker import CHUNK, STREAM_HEAD, WHOLE

ADVANCE = b"+"


class RawProtocol(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not data.startswith(b"POST"):
            self._transport.write(CHUNK * data.count(ADVANCE))
        elif b'"stream": true' in data:
            self._transport.write(STREAM_HEAD + CHUNK * data.count(ADVANCE))  # the first may come with the request
        else:
            self._transport.write(WHOLE)


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(RawProtocol, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
