"""The examples below deploy/ for many gateways, for KubeRay and for LeaderWorkerSet.

Pods in custom resources are checked by the schema of a Pod, and the resources around them by the fields that their
definitions have, which are listed here.
"""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tools.test_deploy import DEPLOY, ROOT, built, checked, with_downward

from scripts.cluster_manager.config import ROLES, read_cluster_file
from scripts.cluster_manager.main import _parser

Document = dict[str, Any]

RAY_FILE = DEPLOY / "kuberay" / "baton.yaml"
GROUP_FILE = DEPLOY / "leaderworkerset" / "nodes.yaml"
#: Fields by the path at which they may be; a Pod template ends a path.
FIELDS = {
    "RayJob": {
        "": {"apiVersion", "kind", "metadata", "spec"},
        "spec": {"entrypoint", "shutdownAfterJobFinishes", "rayClusterSpec"},
        "spec.rayClusterSpec": {
            "rayVersion", "authOptions", "gcsFaultToleranceOptions", "headGroupSpec", "workerGroupSpecs",
        },
        "spec.rayClusterSpec.authOptions": {"mode", "secretName"},
        "spec.rayClusterSpec.gcsFaultToleranceOptions": {"redisAddress", "redisPassword"},
        "spec.rayClusterSpec.gcsFaultToleranceOptions.redisPassword": {"valueFrom"},
        "spec.rayClusterSpec.gcsFaultToleranceOptions.redisPassword.valueFrom": {"secretKeyRef"},
        "spec.rayClusterSpec.gcsFaultToleranceOptions.redisPassword.valueFrom.secretKeyRef": {"name", "key"},
        "spec.rayClusterSpec.headGroupSpec": {"rayStartParams", "template"},
        "spec.rayClusterSpec.workerGroupSpecs": {
            "groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template",
        },
    },
    "LeaderWorkerSet": {
        "": {"apiVersion", "kind", "metadata", "spec"},
        "spec": {"replicas", "rolloutStrategy", "leaderWorkerTemplate"},
        "spec.rolloutStrategy": {"type", "rollingUpdateConfiguration"},
        "spec.rolloutStrategy.rollingUpdateConfiguration": {"maxUnavailable", "maxSurge"},
        "spec.leaderWorkerTemplate": {"size", "restartPolicy", "leaderTemplate", "workerTemplate"},
    },
}  # fmt: skip
TEMPLATES = {"template", "leaderTemplate", "workerTemplate"}


def resource(kind: str) -> Document:
    file = RAY_FILE if kind == "RayJob" else GROUP_FILE
    (found,) = [one for one in yaml.safe_load_all(file.read_text()) if one["kind"] == kind]
    return found


def levels(document: Document, path: str = "") -> Iterator[tuple[str, Document]]:
    """Every object above the Pod templates, with its path."""
    yield path, document
    for name, value in document.items():
        below = f"{path}.{name}" if path else name
        if name in TEMPLATES or below == "metadata" or name == "rayStartParams":
            continue
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                yield from levels(one, below)


def templates(document: Document) -> list[Document]:
    return [value for _, level in levels(document) for name, value in level.items() if name in TEMPLATES]


@pytest.mark.parametrize("kind", list(FIELDS))
def test_custom_resources_have_fields_of_their_definitions_and_valid_pods(kind: str) -> None:
    document = resource(kind)
    for path, level in levels(document):
        assert set(level) <= FIELDS[kind][path], path
    found = templates(document)
    assert len(found) == 2
    for template in found:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template}
        pod["metadata"] = {"name": "pod", **template.get("metadata", {})}
        kubernetes_validate.validate(pod, "1.33", strict=True)
        for container in template["spec"]["containers"]:
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}


def test_the_job_starts_the_cluster_that_its_map_describes(tmp_path: Path) -> None:
    (described,) = [one for one in yaml.safe_load_all(RAY_FILE.read_text()) if one["kind"] == "ConfigMap"]
    path = tmp_path / "cluster.toml"
    path.write_text(described["data"]["cluster.toml"])
    cluster = read_cluster_file(path)
    assert all(cluster.values(role).get("model") for role in ROLES)
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
    assert template["spec"]["terminationGracePeriodSeconds"] > config.drain_timeout
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
