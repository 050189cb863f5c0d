"""The status of a cluster, as ``cluster status`` shows it."""

import msgspec

from scripts.cluster_manager.config import Role


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """An instance, for ``cluster status``."""

    role: Role
    name: str
    host: str
    state: str
    restarts: int
    age_s: float
    revision: int
    url: str
    problem: str


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a cluster.

    Attributes:
        counts: desired instances of each group.
        advised: nodes of each role that the gateways advise.
        failures: the last failure of each group whose instances have not been ready since.
        host: of the supervisor.
    """

    name: str
    revision: int
    counts: dict[Role, int]
    is_autoscaling: bool
    advised: dict[str, int]
    rows: list[Row]
    failures: dict[Role, str]
    is_upgrading: bool
    host: str


def is_settled(status: Status) -> bool:
    """Whether exactly the desired instances exist, and all of them are ready."""
    ready = [row.role for row in status.rows if row.state == "ready"]
    is_complete = all(ready.count(role) == count for role, count in status.counts.items())
    return is_complete and len(ready) == len(status.rows) and not status.is_upgrading


def table(status: Status) -> str:
    """The status for people."""
    heads = ("ROLE", "NAME", "HOST", "STATE", "RESTARTS", "SINCE", "")
    rows = [heads]
    for row in status.rows:
        note = row.problem.partition("\n")[0] or (row.url if row.role == "gateway" else "")
        rows.append((row.role, row.name, row.host or "-", row.state, str(row.restarts), _age(row.age_s), note))
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    counts = ", ".join(f"{count} {role}" for role, count in status.counts.items())
    advice = ", ".join(f"{count} {role}" for role, count in sorted(status.advised.items()))
    lines.append("")
    lines.append(
        f"{status.name} (supervisor on {status.host}), revision {status.revision}: {counts} desired"
        + (f"; advised: {advice}" if advice else "")
        + ("; autoscaling" if status.is_autoscaling else "")
        + ("; upgrading" if status.is_upgrading else "")
    )
    return "\n".join([*lines, *status.failures.values()])


def _age(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
