"""Faults of processes: killed, stopped for a while, drained, given the other role."""

import asyncio
import signal
import time

from common.system.exit_status import how_ended
from scripts.chaos_harness.config import ChaosConfig
from scripts.chaos_harness.faults.base import Fault, Site, noticed_s, unnoticed_s
from scripts.chaos_harness.service import GATEWAY, Node

#: Beyond --drain-timeout, until a drained node has ended.
DRAIN_GRACE_S = 30.0


class Kill(Fault):
    """``kill -9``; the node is started again at the same address."""

    name = "kill"
    is_loss = True
    may_end = True

    async def inject(self, site: Site, node: Node) -> str:
        site.service.kill(node)
        return f"kill -9 {node.name}"


class GatewayKill(Kill):
    """``kill -9`` of a gateway, which is started again at the same address: clients send its requests to another."""

    name = "gateway-kill"
    roles = (GATEWAY,)

    @classmethod
    def why_not(cls, site: Site) -> str:
        return "" if len(site.service.gateways) > 1 else "needs --gateways 2 or more"

    async def inject(self, site: Site, node: Node) -> str:
        await site.service.count_recoveries(node)
        return await super().inject(site, node)


class Pause(Fault):
    """SIGSTOP for less than --node-timeout: the node counts as alive all the time."""

    name = "pause"

    @classmethod
    def lasts_s(cls, config: ChaosConfig) -> tuple[float, float]:
        return unnoticed_s(config)

    async def inject(self, site: Site, node: Node) -> str:
        node.send_signal(signal.SIGSTOP)
        return f"SIGSTOP {node.name}"

    async def undo(self, site: Site, node: Node) -> None:
        node.send_signal(signal.SIGCONT)


class Hang(Pause):
    """SIGSTOP for longer than --node-timeout: the node is lost, and registers again when it goes on."""

    name = "hang"
    is_loss = is_silent = True

    @classmethod
    def lasts_s(cls, config: ChaosConfig) -> tuple[float, float]:
        return noticed_s(config)


class Terminate(Fault):
    """SIGTERM: the node drains and ends; it is started again."""

    name = "terminate"
    may_end = True

    def __init__(self) -> None:
        self._num_starts = 0

    @classmethod
    def lasts_s(cls, config: ChaosConfig) -> tuple[float, float]:
        return (0.0, 0.0)  # ``undo`` sees how the process ends, before it is started again

    async def inject(self, site: Site, node: Node) -> str:
        self._num_starts = node.num_starts
        site.service.remember_resources(node)
        node.send_signal(signal.SIGTERM)
        return f"SIGTERM {node.name}"

    async def undo(self, site: Site, node: Node) -> None:
        limit_s = site.config.drain_timeout + DRAIN_GRACE_S
        ends_at = time.monotonic() + limit_s
        while node.num_starts == self._num_starts and node.is_running:
            if time.monotonic() > ends_at:
                site.problems.append(f"{self.name}: {node.name} had not ended {limit_s:g} s after it was told to drain")
                site.service.kill(node)
                return
            await asyncio.sleep(0.1)
        status = node.process.returncode if node.process is not None and node.num_starts == self._num_starts else 0
        if status < 0:
            site.problems.append(f"{self.name}: {node.name} was {how_ended(status)} in place of ending by itself")


class Drain(Terminate):
    """``POST /v1/workers/NAME/drain``."""

    name = "drain"

    async def inject(self, site: Site, node: Node) -> str:
        self._num_starts = node.num_starts
        site.service.remember_resources(node)
        await post(site, node, "drain", {"timeout_s": site.config.drain_timeout})
        return f"drain {node.name}"


class ChangeRole(Fault):
    """``POST /v1/workers/NAME/role``, and back again."""

    name = "role"

    def __init__(self) -> None:
        self._role = ""

    @classmethod
    def lasts_s(cls, config: ChaosConfig) -> tuple[float, float]:
        return (3.0, 8.0)

    async def inject(self, site: Site, node: Node) -> str:
        before, other = node.role, "prefill" if node.role == "decode" else "decode"
        if await self._change(site, node, other):
            self._role = before
        return f"{node.name} becomes a {other} node"

    async def undo(self, site: Site, node: Node) -> None:
        if self._role:
            await self._change(site, node, self._role)

    async def _change(self, site: Site, node: Node, role: str) -> bool:
        """Order another role, and wait until the node has it; False if the order was refused."""
        if not await post(site, node, "role", {"role": role, "timeout_s": site.config.drain_timeout}):
            return False
        limit_s = site.config.drain_timeout + DRAIN_GRACE_S
        ends_at = time.monotonic() + limit_s
        while node.is_running and not (node.is_registered and node.role == role):
            if time.monotonic() > ends_at:
                site.problems.append(f"role: {node.name} was no {role} node {limit_s:g} s after it was told to be one")
                break
            await asyncio.sleep(0.1)
        return True


async def post(site: Site, node: Node, what: str, body: dict[str, object]) -> bool:
    """Tell a gateway to do something with a node; True if it has accepted that."""
    status, answer = await site.service.order(f"/v1/workers/{node.name}/{what}", body)
    if status not in (200, 202):
        site.problems.append(f"{what}: {node.name}: status {status}, {answer[:200].decode(errors='replace')}")
    return status in (200, 202)
