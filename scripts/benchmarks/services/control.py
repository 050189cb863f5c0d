"""Price of CURVE on the control plane: processor time per message at both ends.

Two processes exchange messages through mailboxes, with keys and without. The processor time of each process, all its
threads, is divided by the number of messages: encoding, ZMQ, encryption, and decoding at the receiver. A prompt is a
``Generate`` as the gateway sends it to both nodes, with token ids of a vocabulary of 151,936.

``bench gateway`` measures a whole gateway with keys and without.
"""

import argparse
import multiprocessing
import random
import statistics
import time
from multiprocessing.connection import Connection as Pipe

import zmq

from common.sampling_params import SamplingParams
from common.wire.curve import CurveKeys, draw_keys
from common.wire.mailbox import Mailbox
from common.wire.messages import Connect, FromDecode, FromGateway, Generate, LayoutMessage, Message, Peer, Ping
from common.wire.process_id import new_incarnation

SHORTEST = ("--seconds=0.3", "--rounds=1")
VOCABULARY = 151_936
KINDS = ("plain", "keys")
AHEAD = 64  # unread messages at most, so that neither side waits for memory
Keys = tuple[CurveKeys, CurveKeys] | None


def messages() -> dict[str, Message]:
    drawn = random.Random(1)
    peer = Peer("prefill-0", "p" * 32, "127.0.0.1:9", "0" * 64)
    prompt = tuple(drawn.randrange(VOCABULARY) for _ in range(32_768))
    return {
        "1 kB": _connect(1_024),
        "64 kB": _connect(65_536),
        "a prompt of 32,768 tokens": Generate("r", 0, prompt, SamplingParams(), peer, peer, 60.0),
    }


def _connect(num_bytes: int) -> Connect:
    """A message whose size is that of one string."""
    return Connect("n", "d", 0, LayoutMessage(1, 1, 8, 16, "float32"), 1, "tcp", "x" * num_bytes)


def receive(pipe: Pipe, accepts: object, keys: Keys) -> None:
    """The receiving process: reports its address, and its processor time for each ``count`` of messages."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    curve = None if keys is None else keys[0].server
    mailbox = Mailbox(context, new_incarnation(), accepts, bind="tcp://127.0.0.1:*", curve=curve)
    pipe.send(mailbox.address)
    while count := pipe.recv():
        begun = time.process_time()
        sender = ""
        while count:
            for socket in mailbox.sockets:
                socket.poll(1)
            mailbox.connection_events()
            for envelope in mailbox.receive():
                count, sender = count - 1, envelope.sender
                if count % AHEAD == 0:
                    mailbox.send(Ping(), target=sender)
        pipe.send(time.process_time() - begun)
    mailbox.close()
    context.term()


def exchange(message: Message, keys: Keys, seconds: float) -> tuple[float, float]:
    """Processor seconds per message of the sender and of the receiver."""
    ours, theirs = multiprocessing.Pipe()
    fork = multiprocessing.get_context("fork")
    accepts = FromGateway if isinstance(message, Generate) else FromDecode
    process = fork.Process(target=receive, args=(theirs, accepts, keys))
    process.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    me = new_incarnation("" if keys is None else keys[1].fingerprint)
    curve = None if keys is None else keys[1].client(keys[1].gateway)
    mailbox = Mailbox(context, me, FromGateway, connect=ours.recv(), curve=curve)

    def send(count: int) -> tuple[float, float]:
        ours.send(count)
        begun = time.process_time()
        for number in range(1, count + 1):
            mailbox.send(message)
            while number % AHEAD == 0 and not mailbox.receive():
                mailbox.sockets[0].poll(1)
                mailbox.connection_events()
        return (time.process_time() - begun) / count, ours.recv() / count

    send(AHEAD)
    once = time.monotonic()
    send(AHEAD)
    count = max(1, round(seconds / (time.monotonic() - once))) * AHEAD
    found = send(count)
    ours.send(0)
    mailbox.close()
    context.term()
    process.join()
    return found


def run(options: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = {}
    print(f"{'CPU us per':32} {'plain':>17} {'with keys':>17}   sender, receiver")
    drawn = draw_keys()
    for name, message in messages().items():
        cells = []
        for kind, keys in zip(KINDS, (None, drawn), strict=True):
            rounds = [exchange(message, keys, options.seconds) for _ in range(options.rounds)]
            for end, values in zip(("sender", "receiver"), zip(*rounds, strict=True), strict=True):
                figures[f"{name}, {kind}, {end}"] = statistics.median(values) * 1e6
            cells.append(" ".join(f"{figures[f'{name}, {kind}, {end}']:8.1f}" for end in ("sender", "receiver")))
        print(f"{name:32} {cells[0]:>17} {cells[1]:>17}")
    return figures


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind (%(default)s)")
