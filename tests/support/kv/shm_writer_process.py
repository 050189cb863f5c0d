"""A writer of shared memory as a process that reads commands as JSON lines from its standard input.

``attach`` waits until the reader accepts; ``write`` fills a page of its own pool and writes it; ``detach`` disconnects.
The reply to each is one line. The process imports neither torch nor zmq, so that it starts quickly.
"""

import json
import os
import sys
import time

import msgspec
from support.kv.kv_fakes import MemfdStore

from common.wire.messages import Connect
from kv_transfer.transports.base import AttachError
from kv_transfer.transports.shm import ShmWriter


def attach(writer: ShmWriter, peer: str, connect: Connect) -> str:
    try:
        writer.attach(peer, connect)
    except AttachError as error:
        return str(error)
    while not (news := writer.poll()):
        time.sleep(0.005)
    return news[0].problem


def main() -> None:
    store = MemfdStore(4)
    writer = ShmWriter(store)
    print(json.dumps(os.getpid()), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer: object = ""
        if command["do"] == "setuid":
            os.setresuid(command["uid"], command["uid"], command["uid"])
        elif command["do"] == "attach":
            answer = attach(writer, command["peer"], msgspec.json.decode(command["connect"], type=Connect))
        elif command["do"] == "write":
            store.fill(0, command["value"])
            writer.write(command["peer"], [(0, command["page"])])
            while not (done := writer.done()):
                time.sleep(0.001)
            answer = len(done)
        elif command["do"] == "detach":
            writer.detach(command["peer"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
