"""The network policies below deploy/ let the components talk that must, and no others.

They are evaluated as Kubernetes defines them: a Pod that no policy selects takes every connection, and one that
policies select takes those that a rule of one of them names.
"""

import shutil
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml
from tools.test_deploy import DEPLOY, built

Document = dict[str, Any]

#: A port that a node chooses itself, for KV pages by TCP or NIXL.
ANY_PORT = 40_000
HTTP, CONTROL, PEERS, NODE_HTTP = 8000, 8001, 8002, 8003
#: The templates of a LeaderWorkerSet by the role of their nodes.
ROLES_OF_GROUP = {"prefill": "leaderTemplate", "decode": "workerTemplate"}


@dataclass(frozen=True)
class Pod:
    """A Pod as policies see it. ``ports`` has the numbers of named ports."""

    labels: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    namespace: str = "baton"


#: Policies, and Pods by component: the gateway, and each kind of nodes.
Manifests = tuple[list[Document], dict[str, Pod]]

CLIENT = Pod()
STRANGER = Pod({"app.kubernetes.io/name": "other"}, namespace="other")
PROMETHEUS = Pod({"app.kubernetes.io/name": "prometheus"}, namespace="monitoring")
ETCD = Pod({"app.kubernetes.io/name": "etcd"})


def pod_of(template: Document) -> Pod:
    ports = [port for container in template["spec"]["containers"] for port in container.get("ports", [])]
    return Pod(template["metadata"]["labels"], {port["name"]: port["containerPort"] for port in ports})


def selects(selector: Document, pod: Pod) -> bool:
    assert set(selector) <= {"matchLabels"}, "this evaluation knows no other selectors"
    return bool(selector.get("matchLabels", {}).items() <= pod.labels.items())


def is_peer(peer: Document, pod: Pod) -> bool:
    assert set(peer) <= {"podSelector", "namespaceSelector"}
    if "namespaceSelector" not in peer:
        return pod.namespace == "baton" and selects(peer["podSelector"], pod)
    assert peer["namespaceSelector"] == {}, "every namespace"
    return selects(peer.get("podSelector", {}), pod)


def allows(policies: list[Document], source: Pod, target: Pod, port: int) -> bool:
    rules = []
    is_isolated = False
    for policy in policies:
        assert policy["spec"]["policyTypes"] == ["Ingress"], "what Pods may open is not restricted"
        if target.namespace == "baton" and selects(policy["spec"]["podSelector"], target):
            is_isolated = True
            rules += policy["spec"]["ingress"]
    return not is_isolated or any(
        ("from" not in rule or any(is_peer(peer, source) for peer in rule["from"]))
        and ("ports" not in rule or any(target.ports.get(one["port"], one["port"]) == port for one in rule["ports"]))
        for rule in rules
    )


@pytest.fixture(scope="module", params=["kubernetes", "kubernetes-roles", "kubernetes-gateways", "leaderworkerset"])
def manifests(request: pytest.FixtureRequest) -> Manifests:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")
    is_group = request.param == "leaderworkerset"
    documents = built("kubernetes" if is_group else request.param)
    policies = [one for one in documents if one["kind"] == "NetworkPolicy"]
    found = {
        one["metadata"]["name"].removeprefix("baton-"): pod_of(one["spec"]["template"])
        for one in documents
        if one["kind"] == "Deployment"
    }
    if is_group:
        (group,) = yaml.safe_load_all((DEPLOY / "leaderworkerset" / "nodes.yaml").read_text())
        del found["nodes"]  # the group takes their place
        template = group["spec"]["leaderWorkerTemplate"]
        found |= {role: pod_of(template[name]) for role, name in ROLES_OF_GROUP.items()}
    return policies, found


def nodes_of(pods: dict[str, Pod]) -> list[Pod]:
    nodes = [pod for name, pod in pods.items() if name != "gateway"]
    assert nodes
    return nodes


def test_clients_and_prometheus_reach_the_http_port_of_gateways(manifests: Manifests) -> None:
    policies, pods = manifests
    for source in (CLIENT, STRANGER, PROMETHEUS):
        assert allows(policies, source, pods["gateway"], HTTP)


def test_only_nodes_reach_the_control_port_of_gateways(manifests: Manifests) -> None:
    policies, pods = manifests
    assert pods["gateway"].ports == {"http": HTTP, "control": CONTROL}
    assert all(allows(policies, node, pods["gateway"], CONTROL) for node in nodes_of(pods))
    for source in (CLIENT, STRANGER, PROMETHEUS, ETCD, pods["gateway"]):
        assert not allows(policies, source, pods["gateway"], CONTROL)


def test_nodes_reach_each_other_at_every_port_and_nothing_else_reaches_them(
    manifests: Manifests,
) -> None:
    policies, pods = manifests
    for target in nodes_of(pods):
        ports = {*target.ports.values(), ANY_PORT}
        assert PEERS in ports
        for source in nodes_of(pods):
            assert all(allows(policies, source, target, port) for port in ports)
        for source in (CLIENT, STRANGER, ETCD, pods["gateway"]):
            assert not any(allows(policies, source, target, port) for port in ports)


def test_prometheus_reaches_the_metrics_of_nodes_alone(manifests: Manifests) -> None:
    policies, pods = manifests
    for target in nodes_of(pods):
        metrics = {number for name, number in target.ports.items() if name.endswith("-http")}
        assert NODE_HTTP in metrics
        for port in {*target.ports.values(), ANY_PORT}:
            assert allows(policies, PROMETHEUS, target, port) == (port in metrics)


def test_gateways_and_nodes_reach_etcd(manifests: Manifests) -> None:
    policies, pods = manifests
    assert all(allows(policies, pod, ETCD, 2379) for pod in pods.values())


def test_only_the_job_and_the_operator_reach_the_dashboard_of_ray_and_clients_the_gateway() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kuberay" / "baton.yaml").read_text()))
    policies = [one for one in documents if one["kind"] == "NetworkPolicy"]
    (job,) = [one for one in documents if one["kind"] == "RayJob"]
    ray = pod_of(job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"])
    submitter = Pod({"batch.kubernetes.io/job-name": job["metadata"]["name"]})
    operator = Pod({"app.kubernetes.io/name": "kuberay-operator"}, namespace="operators")
    store, dashboard, client_server = 6379, 8265, 10_001
    for port in (HTTP, CONTROL, store, dashboard, client_server, ANY_PORT):
        assert allows(policies, ray, ray, port)
        for source in (submitter, operator):
            assert allows(policies, source, ray, port) == (port in (dashboard, HTTP))
        for source in (CLIENT, STRANGER, PROMETHEUS):
            assert allows(policies, source, ray, port) == (port == HTTP)
    assert allows(policies, ray, Pod({"app.kubernetes.io/name": "redis"}), store)
