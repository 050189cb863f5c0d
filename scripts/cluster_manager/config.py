"""``cluster.toml``: the groups of processes of a cluster, and where Ray may place them."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from common.config.gateway import GatewayConfig
from common.config.node import NodeConfig
from common.config.options import merge, options_of
from common.errors import ConfigError, reason_of

Role = Literal["gateway", "prefill", "decode"]
#: In the order in which groups are upgraded.
ROLES: tuple[Role, ...] = ("gateway", "prefill", "decode")
#: Groups without which nothing is served.
NEEDED: tuple[Role, ...] = ("gateway", "decode")
Placement = Literal["pack", "spread", "strict-pack", "strict-spread"]

MAX_COUNT = 10_000
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Seconds = Annotated[float, msgspec.Meta(ge=0.1, le=86_400)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z")]

#: Options of the processes that follow from where they are placed.
PLACED = ("name", "gateway", "gateway_file", "advertise_host", "control_host", "group", "listen_fd")
#: Resources of Ray that have keys of their own in a group.
KEYS_OF_RESOURCES = {"CPU": "cpus", "GPU": "gpus", "memory": "memory-gb"}
CLASSES: Mapping[Role, type] = {"gateway": GatewayConfig, "prefill": NodeConfig, "decode": NodeConfig}


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Fewest and most instances of a group that scales by the gateways' advice."""

    min: Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
    max: Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """Equal processes of one role.

    Attributes:
        options: of the ordinary command, by their names in files.
        cpus, gpus, memory_gb, resources: what Ray reserves on the host for each process.
        labels: that the host must have, in Ray's syntax of label selectors.
        near: the group on whose hosts these processes should be.
        autoscale: its bounds; None if the count changes only by command.
    """

    count: Count
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    cpus: Amount = 1.0
    gpus: Amount = 0.0
    memory_gb: Amount = 0.0
    resources: dict[str, Amount] = msgspec.field(default_factory=dict)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    placement: Placement = "spread"
    near: Role | None = None
    autoscale: Bounds | None = None

    @property
    def bundle(self) -> dict[str, float]:
        """The amounts that a process reserves, as Ray names them."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory_gb * 1e9, **self.resources}
        return {name: amount for name, amount in amounts.items() if amount} or {"CPU": 0.001}


class AutoscaleTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """The times for which more, or fewer, nodes must be advised before a group changes."""

    up_after_s: Seconds = 15.0
    down_after_s: Seconds = 300.0


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """A cluster.

    Attributes:
        options: of all processes; those of a group take precedence.
        lost_after_s: silence of a process after which another one is started in its place.
        surge_wait_s: how long an upgrade waits for room beside a node that it replaces, before it stops that node.
    """

    gateway: Group
    prefill: Group
    decode: Group
    name: Name = "baton"
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    autoscale: AutoscaleTimes = msgspec.field(default_factory=AutoscaleTimes)
    lost_after_s: Seconds = 15.0
    surge_wait_s: Seconds = 20.0

    def group(self, role: Role) -> Group:
        return {"gateway": self.gateway, "prefill": self.prefill, "decode": self.decode}[role]

    def values(self, role: Role) -> dict[str, Any]:
        """Options of the processes of a group by the names of their fields. Raises ConfigError."""
        self._check_common(role)
        place = f"[{role}.options] or [options]"
        given = {**_by_field(self.options), **_by_field(self.group(role).options)}
        return merge(CLASSES[role], flags={}, environ={}, file=given, file_name=place)

    def _check_common(self, role: Role) -> None:
        """Raises ConfigError: an option of all processes is one that those of this group do not have."""
        known = {role: options_of(CLASSES[role]) for role in ROLES}
        for key in self.options:
            name = key.replace("-", "_")
            places = [f"[{other}.options]" for other in ROLES if name in known[other]]
            if places and name not in known[role]:
                raise ConfigError(
                    f"{key} in [options] is not an option of {role} processes: move it to {' and '.join(places)}"
                )


def _by_field(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in options.items()}


def read_cluster_file(path: Path) -> ClusterConfig:
    """Raises ConfigError: the file cannot be read, or a key or value is wrong; the message names it."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {reason_of(error)}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path} is not valid TOML: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path} has a number that is too long, or is nested too deeply") from error
    try:
        config = msgspec.convert(content, ClusterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_in_words(str(error))}") from None
    try:
        check(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return config


def _in_words(message: str) -> str:
    """A message of msgspec with the key in the words of TOML: ``Expected `int` - at decode.count``."""
    return message.replace("`$.", "`").replace(" - at `$`", " - at the top of the file")


def check(config: ClusterConfig) -> None:
    """Raises ConfigError: values contradict each other, or a process would refuse them."""
    for role in ROLES:
        group = config.group(role)
        values = config.values(role)
        _check_options(role, values)
        _check_bounds(role, group)
        for name in group.resources:
            if key := KEYS_OF_RESOURCES.get(name):
                raise ConfigError(f"{role}.resources.{name} has a key of its own: give {role}.{key} instead")
        if group.near == role:
            raise ConfigError(f'{role}.near is the group itself; name another group, or use placement = "pack"')
        if group.near is not None and config.group(group.near).near is not None:
            raise ConfigError(
                f"{role}.near = {group.near!r}, which is near another group itself; leave one of them out"
            )
        ranks = values.get("tp", 1)
        if 0 < group.gpus < ranks:
            raise ConfigError(
                f"{role}.gpus = {group.gpus:g} is less than its ranks (tp = {ranks}); give gpus = {ranks}"
            )
    check_counts(config, {role: config.group(role).count for role in ROLES}, "{role}.count")
    if config.gateway.autoscale is not None:
        raise ConfigError("gateway.autoscale: gateways advise on nodes alone; leave it out")
    scaled = config.prefill.autoscale or config.decode.autoscale
    if scaled and config.values("gateway").get("auto_roles"):
        raise ConfigError("autoscale and the gateway's auto-roles would both change the groups; leave one of them out")


def check_counts(config: ClusterConfig, counts: Mapping[Role, int], name: str) -> None:
    """Raises ConfigError: with these counts the cluster serves nothing.

    Args:
        name: of a count in a message, with ``{role}`` in it.
    """
    for role, count in counts.items():
        if count == 0 and role in NEEDED:
            raise ConfigError(f"{name.format(role=role)} must be at least 1")
        if count > MAX_COUNT:
            raise ConfigError(f"{name.format(role=role)} must be at most {MAX_COUNT:,}, not {count:,}")
    if counts["prefill"] == 0 and config.values("gateway").get("local_prefill") != "always":
        raise ConfigError(
            f'{name.format(role="prefill")} = 0 leaves no node to compute prompts: add local-prefill = "always" to '
            "gateway.options"
        )


def _check_options(role: Role, values: Mapping[str, Any]) -> None:
    known = options_of(CLASSES[role])
    for name in values:
        key = name.replace("_", "-")
        if name in PLACED:
            raise ConfigError(f"{role}.options.{key} follows from where the process is placed; leave it out")
        if known[name].is_secret and name != "keys":
            raise ConfigError(
                f"{role}.options.{key} is a secret, which Ray would send in the clear; set {known[name].env} in the "
                "environment of ray start on every host"
            )


def _check_bounds(role: Role, group: Group) -> None:
    bounds = group.autoscale
    if bounds is None:
        return
    if bounds.min > bounds.max:
        raise ConfigError(f"{role}.autoscale.min = {bounds.min} is more than its max = {bounds.max}")
    if not bounds.min <= group.count <= bounds.max:
        raise ConfigError(f"{role}.count = {group.count} is not within autoscale ({bounds.min} to {bounds.max})")
