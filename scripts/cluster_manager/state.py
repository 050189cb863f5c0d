"""The state that the supervisor of a cluster keeps in Ray's own store.

The store belongs to Ray's global control service. It survives the supervisor and its host, and with Redis behind it the
loss of the head, too.
"""

import msgspec
from ray.experimental import internal_kv

from scripts.cluster_manager.config import ROLES, ClusterConfig, Role

NAMESPACE = "baton"


class InstanceRecord(msgspec.Struct, frozen=True):
    """An instance, written down before anything of it exists.

    Attributes:
        drain_timeout_s: of the configuration with which it was started.
    """

    name: str
    role: Role
    number: int
    revision: int
    drain_timeout_s: float
    is_stopping: bool = False


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor must know again after a restart.

    Attributes:
        counts: of each group, as in the configuration or as changed since.
        next_numbers: of each group; a number is given once.
        is_going_down: the cluster stops for good.
    """

    config: ClusterConfig
    counts: dict[Role, int]
    revision: int = 1
    is_autoscaling: bool = False
    next_numbers: dict[Role, int] = msgspec.field(default_factory=lambda: dict.fromkeys(ROLES, 0))
    instances: tuple[InstanceRecord, ...] = ()
    is_going_down: bool = False


def _key(cluster: str) -> bytes:
    return f"cluster/{cluster}".encode()


def load(cluster: str) -> ClusterState | None:
    """The state of a cluster; None if there is none."""
    found = internal_kv._internal_kv_get(_key(cluster), namespace=NAMESPACE.encode())
    return None if found is None else msgspec.json.decode(found, type=ClusterState)


def save(cluster: str, state: ClusterState) -> None:
    internal_kv._internal_kv_put(_key(cluster), msgspec.json.encode(state), True, namespace=NAMESPACE.encode())


def forget(cluster: str) -> None:
    internal_kv._internal_kv_del(_key(cluster), namespace=NAMESPACE.encode())
