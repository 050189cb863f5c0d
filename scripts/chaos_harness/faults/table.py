"""The table of all faults, by the name with which ``--faults`` chooses them."""

from scripts.chaos_harness.faults.base import Fault
from scripts.chaos_harness.faults.clients import HostileClients, VanishingClients
from scripts.chaos_harness.faults.network import Cut, Delay, Flap, Loss, PairCut, Reset, Silence
from scripts.chaos_harness.faults.processes import ChangeRole, Drain, GatewayKill, Hang, Kill, Pause, Terminate
from scripts.chaos_harness.faults.resources import Descriptors, FullDisk, Memory

FAULTS: dict[str, type[Fault]] = {
    fault.name: fault
    for fault in (
        Kill, GatewayKill, Hang, Cut, Memory,
        Pause, Terminate, Drain, ChangeRole, Loss, Delay, Flap, PairCut, Reset, Silence, FullDisk, Descriptors,
        HostileClients, VanishingClients,
    )
}  # fmt: skip
