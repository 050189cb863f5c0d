"""The examples below deploy/ for many gateways, for KubeRay and for LeaderWorkerSet.

Pods in custom resources are checked by the schema of a Pod, and the resources around them, KEDA's too, by schemas that
are written here after their public definitions.
"""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from tools.test_deploy import DEPLOY, ROOT, TIME_TO_END_S, built, checked, with_downward

from scripts.cluster_manager.config import ROLES, read_cluster_file
from scripts.cluster_manager.main import _parser

Document = dict[str, Any]

RAY_FILE = DEPLOY / "kuberay" / "baton.yaml"
GROUP_FILE = DEPLOY / "leaderworkerset" / "nodes.yaml"


def fields(required: str = "", **properties: Document) -> Document:
    """The schema of an object that has no other fields."""
    known = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**known, "required": required.split()}


def resource_of(version: str, kind: str, spec: Document) -> Document:
    named = {"type": "object", "required": ["name"]}
    top = {"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": named, "spec": spec}
    return fields("apiVersion kind metadata spec", **top)


TEXT, YES_OR_NO, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
POD_TEMPLATE = {"type": "object", "required": ["metadata", "spec"]}
COUNT_OR_SHARE = {"oneOf": [COUNT, {"type": "string", "pattern": "^[0-9]+%$"}]}
SECRET = fields("secretKeyRef", secretKeyRef=fields("name key", name=TEXT, key=TEXT))
RAY_CLUSTER = fields(
    "headGroupSpec",
    rayVersion=TEXT,
    authOptions=fields("mode", mode={"enum": ["disabled", "token"]}, secretName=TEXT),
    gcsFaultToleranceOptions=fields(
        "redisAddress", redisAddress=TEXT, redisPassword=fields("valueFrom", valueFrom=SECRET)
    ),
    headGroupSpec=fields("rayStartParams template", rayStartParams=TEXTS, template=POD_TEMPLATE),
    workerGroupSpecs={
        "type": "array",
        "items": fields(
            "groupName minReplicas maxReplicas rayStartParams template",
            groupName=TEXT, replicas=COUNT, minReplicas=COUNT, maxReplicas=COUNT, rayStartParams=TEXTS,
            template=POD_TEMPLATE,
        ),
    },
)  # fmt: skip
PROMETHEUS_TRIGGER = fields(
    "type metadata",
    type={"const": "prometheus"},
    metricType={"enum": ["AverageValue", "Value"]},
    metadata=fields(
        "serverAddress query threshold",
        serverAddress=TEXT, query=TEXT, threshold=TEXT, ignoreNullValues={"enum": ["true", "false"]},
    ),
)  # fmt: skip
#: What the custom resources may have, of what their definitions know. Numbers in ``rayStartParams`` and in the metadata
#: of triggers are strings there.
SCHEMAS = {
    "RayJob": resource_of(
        "ray.io/v1",
        "RayJob",
        fields(
            "entrypoint rayClusterSpec",
            entrypoint=TEXT, shutdownAfterJobFinishes=YES_OR_NO, rayClusterSpec=RAY_CLUSTER,
        ),
    ),
    "LeaderWorkerSet": resource_of(
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        fields(
            "leaderWorkerTemplate",
            replicas=COUNT,
            rolloutStrategy=fields(
                "type",
                type={"const": "RollingUpdate"},
                rollingUpdateConfiguration=fields(maxUnavailable=COUNT_OR_SHARE, maxSurge=COUNT_OR_SHARE),
            ),
            leaderWorkerTemplate=fields(
                "workerTemplate",
                size={"type": "integer", "minimum": 1},
                restartPolicy={"enum": ["None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart"]},
                leaderTemplate=POD_TEMPLATE,
                workerTemplate=POD_TEMPLATE,
            ),
        ),
    ),
    "ScaledObject": resource_of(
        "keda.sh/v1alpha1",
        "ScaledObject",
        fields(
            "scaleTargetRef triggers",
            scaleTargetRef=fields("name", name=TEXT),
            minReplicaCount=COUNT, maxReplicaCount=COUNT,
            triggers={"type": "array", "minItems": 1, "items": PROMETHEUS_TRIGGER},
        ),
    ),
}  # fmt: skip
TEMPLATES = {"template", "leaderTemplate", "workerTemplate"}


def resource(kind: str) -> Document:
    file = RAY_FILE if kind == "RayJob" else GROUP_FILE
    (found,) = [one for one in yaml.safe_load_all(file.read_text()) if one["kind"] == kind]
    return found


def templates(document: Document) -> list[Document]:
    """The Pod templates of a resource, in order."""
    found = []
    for name, value in document.items():
        if name in TEMPLATES:
            found.append(value)
            continue
        for one in value if isinstance(value, list) else [value]:
            found += templates(one) if isinstance(one, dict) else []
    return found


def assert_valid(document: Document) -> None:
    kind = document["kind"]
    jsonschema.Draft202012Validator(SCHEMAS[kind]).validate(document)
    if kind == "ScaledObject":
        assert 0 < document["spec"]["minReplicaCount"] <= document["spec"]["maxReplicaCount"]


@pytest.mark.parametrize("kind", ["RayJob", "LeaderWorkerSet"])
def test_custom_resources_follow_their_definitions_and_have_valid_pods(kind: str) -> None:
    document = resource(kind)
    assert_valid(document)
    found = templates(document)
    assert len(found) == 2
    for template in found:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template}
        pod["metadata"] = {"name": "pod", **template.get("metadata", {})}
        kubernetes_validate.validate(pod, "1.33", strict=True)
        for container in template["spec"]["containers"]:
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}


def test_counts_of_groups_are_within_their_bounds() -> None:
    for group in resource("RayJob")["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    update = resource("LeaderWorkerSet")["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
    assert (update["maxUnavailable"], update["maxSurge"]) != (0, 0)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_scaled_objects_follow_their_definition_and_scale_a_deployment_that_exists(role: str) -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes-roles" / f"{role}.yaml").read_text()))
    (scaled,) = [one for one in documents if one["kind"] == "ScaledObject"]
    assert_valid(scaled)
    (deployment,) = [one for one in documents if one["kind"] == "Deployment"]
    assert scaled["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"], "they would be set back at every change"
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metadata"]["ignoreNullValues"] == "false", "a missing series would end all nodes but one"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scaleTargetRef", {}),
        ("minReplicaCount", "1"),
        ("triggers", []),
        ("triggers", [{"type": "prometheus", "metadata": {"serverAddress": "a", "query": "b", "threshold": 1}}]),
        ("maxReplicas", 8),
    ],
)
def test_a_scaled_object_that_keda_would_refuse_is_noticed(name: str, value: object) -> None:
    *_, scaled = yaml.safe_load_all((DEPLOY / "kubernetes-roles" / "decode.yaml").read_text())
    scaled["spec"][name] = value
    with pytest.raises(jsonschema.ValidationError):
        assert_valid(scaled)


def test_the_job_starts_the_cluster_that_its_map_describes(tmp_path: Path) -> None:
    (described,) = [one for one in yaml.safe_load_all(RAY_FILE.read_text()) if one["kind"] == "ConfigMap"]
    path = tmp_path / "cluster.toml"
    path.write_text(described["data"]["cluster.toml"])
    cluster = read_cluster_file(path)
    assert all(cluster.values(role).get("model") for role in ROLES)
    assert all(cluster.values(role).get("memory_fraction") == 0.8 for role in ROLES if cluster.group(role).gpus)
    job = resource("RayJob")
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:3] == ["baton", "cluster", "up"]
    options = _parser().parse_args(words[2:])
    assert (str(options.config), options.address) == ("/etc/baton/cluster.toml", "auto")
    gpus = sum(cluster.group(role).count * cluster.group(role).gpus for role in ROLES)
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert group["minReplicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"]) >= gpus
    for template in templates(job):
        assert "/etc/baton/cluster.toml" in [m["mountPath"] for m in template["spec"]["containers"][0]["volumeMounts"]]


def test_ray_is_the_release_of_the_image_and_takes_no_strangers() -> None:
    spec = resource("RayJob")["spec"]["rayClusterSpec"]
    version = spec["rayVersion"]
    assert f"ray=={version}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert f"'ray[default]=={version}'" in RAY_FILE.read_text(), "the image of the job"
    assert spec["authOptions"]["mode"] == "token"
    (policy,) = [one for one in yaml.safe_load_all(RAY_FILE.read_text()) if one["kind"] == "NetworkPolicy"]
    kubernetes_validate.validate(policy, "1.33", strict=True)
    for template in templates(resource("RayJob")):
        assert template["metadata"]["labels"] == policy["spec"]["podSelector"]["matchLabels"]


@pytest.mark.parametrize(("index", "role"), [(0, "prefill"), (1, "decode")])
def test_pods_of_a_group_run_existing_commands(index: int, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = templates(resource("LeaderWorkerSet"))[index]
    (container,) = template["spec"]["containers"]
    words = [word.replace("$(ROLE)", role) for word in container["args"]]
    assert {"name": "ROLE", "value": role} in container["env"]
    config = checked(with_downward(words, container), {"BATON_CLUSTER_KEY": "key"}, monkeypatch)
    assert template["metadata"]["labels"]["baton/role"] == role
    assert config.memory_fraction == 0.8, "no other node shares its GPU"
    assert "lifecycle" not in container
    assert template["spec"]["terminationGracePeriodSeconds"] >= config.drain_timeout + TIME_TO_END_S
    assert {port["containerPort"] for port in container["ports"]} == {config.data_port, config.http_port}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
def test_gateways_are_scaled_by_series_of_theirs_and_found_through_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = {(one["kind"], one["metadata"]["name"]): one for one in built("kubernetes-gateways")}
    for document in documents.values():
        if not document["apiVersion"].startswith("keda.sh/"):
            kubernetes_validate.validate(document, "1.33", strict=True)
    scaler = documents["HorizontalPodAutoscaler", "baton-gateway"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == "baton-gateway"
    gateway = documents["Deployment", "baton-gateway"]["spec"]
    assert "replicas" not in gateway, "it would be set back at every change"
    (pods,) = [metric["pods"] for metric in scaler["metrics"] if metric["type"] == "Pods"]
    assert f"`{pods['metric']['name']}`" in (ROOT / "docs" / "metrics.md").read_text()
    (settings,) = [one["data"] for (kind, _), one in documents.items() if kind == "ConfigMap"]
    for name in ("gateway", "prefill", "decode"):
        (container,) = documents["Deployment", f"baton-{name}"]["spec"]["template"]["spec"]["containers"]
        secret = "BATON_API_KEY" if name == "gateway" else "BATON_CLUSTER_KEY"
        monkeypatch.delenv("BATON_API_KEY", raising=False)
        variables = {**settings, secret: "key"}
        config = checked(with_downward(container["args"], container), variables, monkeypatch)
        assert config.etcd_urls == ("http://baton-etcd:2379",)
        assert not re.search(r"--gateway=", " ".join(container["args"]))
