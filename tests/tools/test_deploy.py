"""The example files under deploy/: every command in them is one that Baton takes, and their parts fit together.

Where ``systemd-analyze`` and ``kubectl`` exist they judge too.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from common.config.cli import CLASSES, OTHER_COMMANDS, parse
from common.config.gateway import GatewayConfig
from common.config.options import options_of
from common.config.shared import OTHER_VARIABLES
from common.errors import ConfigError
from gateway.requests.input.grammars.checker import NUM_PROCESSES
from gateway.requests.input.grammars.compiler import MAX_MEMORY_BYTES
from scripts.cli import PROCESSES

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFESTS = ("gateway.yaml", "nodes.yaml", "network-policy.yaml")
CONTAINERFILE = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")

Words = list[str]
Document = dict[str, Any]


def checked(words: Words, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration of ``baton WORDS``; raises if Baton refuses it."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command, *flags = words
    return parse(CLASSES[command], flags, command=command)


# ---- systemd --------------------------------------------------------------------------------------------------------


def settings_of(unit: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        name, is_setting, value = line.partition("=")
        if is_setting and not line.startswith(("#", "[")):
            found.setdefault(name, []).append(value)
    return found


def test_there_is_a_unit_for_every_role() -> None:
    assert [unit.stem.removeprefix("baton-").removesuffix("@") for unit in UNITS] == ["decode", "gateway", "prefill"]
    assert {"decode", "gateway", "prefill"} == set(PROCESSES)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_run_commands_that_exist_with_the_example_configuration(
    unit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(unit)
    program, *words = shlex.split(settings["ExecStart"][0].replace("%i", "0"))
    assert Path(program).name == "baton"
    variables = dict(pair.split("=", 1) for line in settings["Environment"] for pair in line.split())
    assert variables["BATON_CONFIG"] == "/etc/baton/baton.toml"
    variables["BATON_CONFIG"] = str(DEPLOY / "systemd" / "baton.toml")
    config = checked(words, variables, monkeypatch)
    if words[0] == "gateway":
        assert (config.host, config.control_port) == ("127.0.0.1", 8001)
    else:
        assert (config.name, config.gateway) == (f"{words[0]}-0", "127.0.0.1:8001")


def test_nodes_that_share_memory_run_as_one_user_in_the_namespaces_of_the_machine() -> None:
    users = {settings_of(unit)["User"][0] for unit in UNITS}
    assert users == {"baton"}
    for unit in UNITS:
        assert not {"PrivateNetwork", "PrivateUsers", "PrivatePIDs", "DynamicUser"} & set(settings_of(unit))
        assert "AF_UNIX" in settings_of(unit)["RestrictAddressFamilies"][0]


def test_units_do_not_restart_after_a_refused_configuration() -> None:
    for unit in UNITS:
        assert settings_of(unit)["RestartPreventExitStatus"] == ["2"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for path in (DEPLOY / "systemd").glob("baton*"):
        text = path.read_text().replace("/opt/baton/bin/baton", sys.executable)  # the executable must exist
        (tmp_path / path.name.replace("@.", "@0.")).write_text(text)
        (tmp_path / path.name).write_text(text)
    names = sorted(str(path) for path in tmp_path.iterdir() if "@." not in path.name and path.suffix != ".toml")
    assert len(names) == 4
    ended = subprocess.run(["systemd-analyze", "verify", *names], capture_output=True, text=True, timeout=60)
    # It also reports other units of this machine.
    complaints = [line for line in ended.stderr.splitlines() if "baton" in line]
    assert not complaints


# ---- Kubernetes -----------------------------------------------------------------------------------------------------


def documents() -> list[Document]:
    return [found for each in MANIFESTS for found in yaml.safe_load_all((DEPLOY / "kubernetes" / each).read_text())]


def deployments() -> dict[str, Document]:
    return {each["metadata"]["name"]: each["spec"]["template"] for each in documents() if each["kind"] == "Deployment"}


def containers() -> Iterator[tuple[Document, Document]]:
    """Every container, with the Pod's specification."""
    for template in deployments().values():
        for container in template["spec"]["containers"]:
            yield container, template["spec"]


def labels(component: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "baton", "app.kubernetes.io/component": component}


def with_downward(words: Words, container: Document) -> Words:
    known = {"POD_IP": "10.1.2.3", "POD_NAME": "baton-nodes-0"}
    given = {variable["name"] for variable in container["env"]}
    used = set(re.findall(r"\$\((\w+)\)", " ".join(words)))
    assert used <= given, f"{used - given} are in no env"
    return [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], word) for word in words]


def variables_of(container: Document) -> dict[str, str]:
    """Variables of the environment, with plausible values."""
    found = {one["name"]: "4" if one["name"] == "BATON_THREADS" else "key" for one in container["env"]}
    for generated in kustomization()["configMapGenerator"]:
        found |= dict(literal.split("=", 1) for literal in generated["literals"])
    return {name: value for name, value in found.items() if name.startswith("BATON_")}


def kustomization() -> Document:
    found: Document = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())
    return found


@pytest.mark.parametrize("name", ["gateway", "prefill", "decode"])
def test_containers_run_existing_commands_with_known_variables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (container,) = [each for each, _ in containers() if each["name"] == name]
    words = with_downward(container["args"], container)
    assert words[0] == name
    config = checked(words, variables_of(container), monkeypatch)
    if name != "gateway":
        assert config.cluster_key == "key"
        assert config.threads == 4


def test_prefill_and_decode_share_network_processes_and_user() -> None:
    spec = deployments()["baton-nodes"]["spec"]
    assert [container["name"] for container in spec["containers"]] == ["prefill", "decode"]
    assert spec["shareProcessNamespace"] is True
    for container in spec["containers"]:
        assert "runAsUser" not in container["securityContext"]  # set once for the Pod


def test_no_container_is_root_and_all_declare_resources() -> None:
    uid = re.search(r"^USER (\d+)", CONTAINERFILE, re.MULTILINE)
    assert uid
    for container, spec in containers():
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == int(uid[1])
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]


def test_a_grammar_exceeds_the_memory_of_its_process_before_that_of_the_container() -> None:
    """At the limit of a container, the kernel ends all of its processes."""
    (gateway,) = [container for container, _ in containers() if container["name"] == "gateway"]
    given = int(gateway["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    assert given >= NUM_PROCESSES * MAX_MEMORY_BYTES + (1 << 30)


def test_kubernetes_sets_no_service_variables() -> None:
    for _, spec in containers():
        assert spec["enableServiceLinks"] is False


def test_service_variables_of_kubernetes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="BATON_CONTROL_SERVICE_HOST"):
        checked(["gateway"], {"BATON_CONTROL_SERVICE_HOST": "10.0.0.1"}, monkeypatch)


def test_selectors_match_the_pods() -> None:
    found = {name: template["metadata"]["labels"] for name, template in deployments().items()}
    assert found == {"baton-gateway": labels("gateway"), "baton-nodes": labels("nodes")}
    for each in documents():
        spec = each["spec"]
        if each["kind"] == "Deployment":
            assert spec["selector"]["matchLabels"] == found[each["metadata"]["name"]]
        elif each["kind"] == "Service":
            assert spec["selector"] == labels("gateway")
        else:
            assert spec["podSelector"]["matchLabels"] in found.values()


def test_nodes_reach_the_gateway_before_it_is_ready() -> None:
    services = {each["metadata"]["name"]: each["spec"] for each in documents() if each["kind"] == "Service"}
    (address,) = {word for container, _ in containers() for word in container["args"] if word.startswith("--gateway")}
    name, port = address.removeprefix("--gateway=").split(":")
    assert services[name]["publishNotReadyAddresses"] is True
    assert [str(each["port"]) for each in services[name]["ports"]] == [port]


def test_ports_are_those_of_the_commands() -> None:
    for container, _ in containers():
        numbers = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        words = " ".join(container["args"])
        if container["name"] == "gateway":
            assert numbers["http"] == options_of(GatewayConfig)["port"].default
            assert f"--control-port={numbers['control']}" in words
            http = "http"
        else:
            http = f"{container['name']}-http"
            assert f"--http-port={numbers[http]}" in words
            peers = "peers" if container["name"] == "prefill" else "decode-peers"
            assert f"--data-port={numbers[peers]}" in words
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container.get(probe, {}).get("httpGet", {"port": http})["port"] == http


def test_probes_use_existing_routes() -> None:
    (gateway,) = [container for container, _ in containers() if container["name"] == "gateway"]
    asked = {probe: gateway[probe]["httpGet"]["path"] for probe in gateway if probe.endswith("Probe")}
    assert asked == {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
    routes = "".join(path.read_text() for path in (ROOT / "gateway" / "http").glob("**/*.py"))
    assert all(f'"{path}"' in routes for path in asked.values())
    for container, _ in containers():
        if container["name"] != "gateway":
            asked = {probe: container[probe]["httpGet"]["path"] for probe in container if probe.endswith("Probe")}
            assert asked == {"startupProbe": "/health", "livenessProbe": "/health"}


def test_every_volume_secret_and_map_exists() -> None:
    maps = {generated["name"] for generated in kustomization()["configMapGenerator"]}
    said = (DEPLOY / "kubernetes" / "kustomization.yaml").read_text()
    for container, spec in containers():
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert {source["configMapRef"]["name"] for source in container["envFrom"]} <= maps
        for variable in container["env"]:
            if secret := variable["valueFrom"].get("secretKeyRef"):
                assert f"generic {secret['name']} " in said
                assert f"--from-literal={secret['key']}=" in said


def test_the_kustomization_lists_every_manifest() -> None:
    there = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization()["resources"]) == there == set(MANIFESTS)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
def test_kubectl_can_build_it() -> None:
    command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    built = list(yaml.safe_load_all(ended.stdout))
    assert sorted(each["kind"] for each in built) == [
        "ConfigMap", "Deployment", "Deployment", "NetworkPolicy", "NetworkPolicy", "Service", "Service",
    ]  # fmt: skip


# ---- Kubernetes, a Deployment for each role -------------------------------------------------------------------------


def built(folder: str) -> list[Document]:
    """What ``kubectl apply -k`` would apply."""
    ended = subprocess.run(["kubectl", "kustomize", DEPLOY / folder], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return list(yaml.safe_load_all(ended.stdout))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
@pytest.mark.parametrize("folder", ["kubernetes", "kubernetes-roles"])
def test_manifests_follow_the_schemas_of_kubernetes(folder: str) -> None:
    """Those of KEDA are not among them: ``test_deploy_groups.py`` has them."""
    for document in built(folder):
        if not document["apiVersion"].startswith("keda.sh/"):
            kubernetes_validate.validate(document, "1.33", strict=True)


#: Seconds between the end of draining and the kill.
TIME_TO_END_S = 10


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
@pytest.mark.parametrize("folder", ["kubernetes", "kubernetes-roles", "kubernetes-gateways"])
def test_pods_have_time_for_their_hook_and_for_draining(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = built(folder)
    (settings,) = [one["data"] for one in found if one["kind"] == "ConfigMap"]
    slept = {}
    for document in found:
        if document["kind"] != "Deployment":
            continue
        template = document["spec"]["template"]
        for container in template["spec"]["containers"]:
            variables = {"BATON_API_KEY": "key"} if container["name"] == "gateway" else {"BATON_CLUSTER_KEY": "key"}
            with monkeypatch.context() as only_here:
                config = checked(with_downward(container["args"], container), settings | variables, only_here)
            hook = container.get("lifecycle", {}).get("preStop", {"sleep": {"seconds": 0}})
            slept[container["name"]] = seconds = hook["sleep"]["seconds"]
            given = template["spec"]["terminationGracePeriodSeconds"]
            assert given >= seconds + config.drain_timeout + TIME_TO_END_S, container["name"]
    # Services send connections to gateways alone, and clients have another gateway only where there are several.
    assert slept == {"gateway": 5 if folder == "kubernetes-gateways" else 0, "prefill": 0, "decode": 0}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_nodes_of_one_role_run_existing_commands_and_are_scaled_by_advice(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DEPLOY / "kubernetes-roles" / f"{role}.yaml").read_text()
    deployment, budget, scaled = yaml.safe_load_all(text)
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    config = checked(with_downward(container["args"], container), variables_of(container), monkeypatch)
    assert container["args"][0] == container["name"] == role
    assert config.memory_fraction == 0.8, "no other node shares its GPU"
    assert template["spec"]["terminationGracePeriodSeconds"] > config.drain_timeout
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"peers": config.data_port, f"{role}-http": config.http_port}
    assert (
        container["startupProbe"]["httpGet"]["port"] == container["livenessProbe"]["httpGet"]["port"] == f"{role}-http"
    )
    labels_there = template["metadata"]["labels"]
    assert labels("nodes").items() <= labels_there.items(), "the network policies would not be for these Pods"
    for selector in (deployment["spec"]["selector"], budget["spec"]["selector"]):
        assert selector["matchLabels"].items() <= labels_there.items()
    assert scaled["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metadata"]["query"] == f'max(baton_advised_nodes{{role="{role}"}})'
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    assert "| `baton_advised_nodes{" in metrics


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
def test_nodes_of_one_role_take_the_place_of_those_that_share_a_pod() -> None:
    names = {each["metadata"]["name"]: each for each in built("kubernetes-roles") if each["kind"] == "Deployment"}
    assert sorted(names) == ["baton-decode", "baton-gateway", "baton-prefill"]
    for role in ("prefill", "decode"):
        (container,) = names[f"baton-{role}"]["spec"]["template"]["spec"]["containers"]
        assert "--transport=nixl" in container["args"]
        assert container["resources"]["limits"]["rdma/hca"] == "1"


# ---- the image ------------------------------------------------------------------------------------------------------


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)$", CONTAINERFILE, re.MULTILINE)


def test_the_image_copies_existing_files_and_all_packages() -> None:
    copied = {
        source for line in instructions("COPY") if "--from" not in line for source in line.split()[:-1]
    }  # fmt: skip
    assert all((ROOT / source).exists() for source in copied)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages <= copied


def test_the_default_command_of_the_image_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [json.loads(line) for line in instructions("ENTRYPOINT")] == [["/opt/baton/bin/baton"]]
    (words,) = [json.loads(line) for line in instructions("CMD")]
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0"):
        checked(words, {}, monkeypatch)
    assert checked(words, {"BATON_API_KEY": "key"}, monkeypatch).host == "0.0.0.0"


def test_the_user_of_the_image_may_write_where_downloads_and_kernels_are_kept() -> None:
    """It has no home folder, and in Kubernetes the rest of the image cannot be written."""
    (line,) = instructions("ENV")
    variables = dict(word.split("=", 1) for word in line.split())
    assert "install -d -o 10001 -g 10001 /var/cache/baton" in CONTAINERFILE
    folders = [f"{variables['XDG_CACHE_HOME']}/baton", variables["HF_HOME"], variables["TRITON_CACHE_DIR"]]
    assert all(Path(folder).is_relative_to("/var/cache/baton") for folder in folders)


def test_the_base_is_an_argument_and_packages_are_pinned() -> None:
    assert "ARG BASE=python:3.12-slim" in CONTAINERFILE
    assert all(line.startswith("${BASE}") for line in instructions("FROM"))
    assert "-c constraints.txt" in CONTAINERFILE


# ---- all of it ------------------------------------------------------------------------------------------------------


def files() -> list[Path]:
    return sorted(path for path in DEPLOY.rglob("*") if path.is_file())


def test_every_mentioned_variable_is_known() -> None:
    known = {found.env for cls in CLASSES.values() for found in options_of(cls).values()} | set(OTHER_VARIABLES)
    for path in files():
        for name in re.findall(r"\bBATON_[A-Z_]+\b(?!\*)", path.read_text()):
            is_foreign = name.startswith(tuple(OTHER_COMMANDS.values())) or name in ("BATON_GATEWAY_PORT", "BATON_PORT")
            assert name in known or name == "BATON_" or is_foreign, f"{path.name}: {name}"


def test_every_mentioned_flag_is_known() -> None:
    known = {found.flag for cls in CLASSES.values() for found in options_of(cls).values()} | {"--help", "--config"}
    for path in files():
        for line in path.read_text().splitlines():
            if re.search(r"\bbaton\S* (serve|gateway|prefill|decode) ", line):
                flags = set(re.findall(r"(?<=\s)--[a-z-]+", line.split("baton", 1)[1]))
                foreign = {"--now", "--rm"}
                assert flags <= known | foreign, f"{path.name}: {line}"


def test_no_file_names_an_external_host() -> None:
    for path in files():
        assert not re.search(r"https?://(?!127\.|localhost|baton)", path.read_text()), path.name
