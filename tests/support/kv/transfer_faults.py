"""Loses or stops a node in the middle of a transfer, and checks that the others go on as if it had not been there."""

import signal
import time
from collections.abc import Callable

from support.kv.transfer_cluster import SOME, Cluster
from support.kv.transport_process import NUM_PAGES
from support.waiting import until

STEPS = ("offered", "attaching", "granted", "writing", "written", "acknowledging")
#: Longer than a healthy peer needs on a busy machine. The other node is stopped for longer than this.
PATIENCE_S = 6.0


def check_loss(cluster: Cluster, victim: str, step: str, kill: Callable[[], None]) -> None:
    """Lose ``p0`` or ``d0`` at a step of their transfer; a replacement then serves with the survivor.

    Args:
        kill: makes the victim end.
    """
    prefill, decode = "p0", "d0"
    survivor = prefill if victim == decode else decode
    cluster.reach(step, "a", prefill, decode, SOME)
    kill()
    cluster.ends[victim].process.wait()
    if victim == decode and step == "writing":
        cluster.ends[prefill].answer()
    cluster.part(survivor, victim)
    has_kept = victim == prefill and step == "acknowledging"
    cluster.balanced(survivor, SOME if has_kept else 0)
    ends = cluster.page_counts(survivor)["ends"]["a"]
    assert ends == ("Completed" if has_kept else "TransferFailed" if victim == prefill else False)
    replacement = cluster.start(victim[0] + "1")
    pair = (replacement, decode) if victim == prefill else (prefill, replacement)
    cluster.serve("b", *pair, SOME)
    for rid in ("a", "b") if has_kept else ("b",):
        cluster.ask(pair[1], "give_back", rid=rid)
    cluster.serve("c", *pair, NUM_PAGES)
    cluster.balanced(pair[0])


def check_stopped_prefill(cluster: Cluster, step: str, ending: signal.Signals) -> None:
    """Stop a prefill node at a step for longer than every timeout, and let it go on or kill it then.

    Pages that the stopped node may still write stay in quarantine. Another node serves from the rest of the pool, and
    what the stopped node writes when it wakes up reaches no page in use.
    """
    decode = cluster.start("d0", TEST_PATIENCE_S=str(PATIENCE_S))
    prefill, other = cluster.start("p0", TEST_PATIENCE_S=str(PATIENCE_S)), cluster.start("p1")
    cluster.reach(step, "a", prefill, decode, SOME)
    cluster.ends[prefill].signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    cluster.part(decode, prefill)
    has_kept = step == "acknowledging"
    expected = "Completed" if has_kept else "TransferFailed"
    assert until(lambda: cluster.page_counts(decode)["ends"].get("a")) == expected
    cluster.serve("b", other, decode, SOME)
    time.sleep(max(0.0, stopped_at + PATIENCE_S + 0.3 - time.monotonic()))
    # The node is stopped, not dead. Where it writes the pool itself, only its message or its death frees these pages.
    may_write = cluster.transport in ("shm", "cuda-ipc", "nixl") and step in ("granted", "writing", "written")
    assert cluster.page_counts(decode)["aside"] == (SOME if may_write else 0)
    cluster.ends[prefill].signal(ending)
    if ending == signal.SIGCONT:
        if step == "writing":
            cluster.ends[prefill].answer()
        cluster.part(prefill, decode)
        cluster.balanced(prefill)
    cluster.balanced(decode, SOME + SOME * has_kept)
    cluster.ask(decode, "give_back", rid="b")  # compares the pages again
    if has_kept:
        cluster.ask(decode, "give_back", rid="a")
    cluster.serve("c", prefill if ending == signal.SIGCONT else other, decode, NUM_PAGES)
