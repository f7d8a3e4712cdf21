"""The manifests in docs/kubernetes: Kubernetes' own schemas take them, and they fit together and to the page."""

from __future__ import annotations

import ast
import json
import re
import shlex
from typing import Any

import pytest

from pdstage import cli
from tests.docs.pages import ROOT

yaml = pytest.importorskip("yaml")
FOLDER = ROOT / "docs" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
OBJECTS: list[dict[str, Any]] = [one for path in FILES for one in yaml.safe_load_all(path.read_text())]
PODS = {one["metadata"]["name"]: one["spec"]["template"] for one in OBJECTS if "template" in one.get("spec", {})}
ENGINES = {name: PODS[name] for name in ("prefill", "decode")}
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()


def of(kind: str) -> list[dict[str, Any]]:
    return [one for one in OBJECTS if one["kind"] == kind]


@pytest.mark.parametrize(
    "one",
    [one for one in OBJECTS if one["kind"] != "PodMonitor"],
    ids=lambda one: f"{one['kind']} {one['metadata']['name']}",
)
def test_kubernetes_schema_takes_it(one):
    checker = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for version in ("1.29", "1.33"):
        checker.validate(one, version, strict=True)


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (one,) = pod["spec"]["containers"]
    return one


@pytest.mark.parametrize("name", ENGINES)
def test_the_hook_drains_the_node_and_fits_into_the_grace_period(name):
    engine = container(ENGINES[name])
    shell, flag, script = engine["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, flag) == ("/bin/sh", "-c")
    sleep, _, command = script.partition("; exec pdstage ")
    given = cli.parser().parse_args(shlex.split(command))
    assert (given.command, given.endpoints, given.directory) == ("drain", ["$PDSTAGE_POD"], "$DIRECTORY")
    assert {"PDSTAGE_POD", "DIRECTORY"} <= {one["name"] for one in engine["env"]}
    assert options(engine)["directory"] == "$(DIRECTORY)"
    assert options(engine)["keys"] == str(given.keys)
    assert float(sleep.split()[1]) + given.wait < ENGINES[name]["spec"]["terminationGracePeriodSeconds"]


def options(engine: dict[str, Any]) -> dict[str, Any]:
    (config,) = (one for one in engine["args"] if one.startswith("--kv-transfer-config="))
    return json.loads(config.partition("=")[2])["kv_connector_extra_config"]


def test_ports_of_engines_and_of_policies_are_the_same():
    policy = next(one for one in of("NetworkPolicy") if one["metadata"]["name"] == "pdstage")
    _, scraped, asked = policy["spec"]["ingress"]
    for pod in ENGINES.values():
        ports = {one["name"]: one["containerPort"] for one in container(pod)["ports"]}
        assert options(container(pod))["metrics_port"] == ports["metrics"] == scraped["ports"][0]["port"]
        n_ranks = int(container(pod)["resources"]["limits"]["nvidia.com/gpu"])
        (monitor,) = (
            one["spec"]
            for one in of("PodMonitor")
            if one["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
        )
        assert monitor["podMetricsEndpoints"] == [{"portNumber": ports["metrics"] + rank} for rank in range(n_ranks)]
        assert f"--tensor-parallel-size={n_ranks}" in container(pod)["args"]
        assert ports["metrics"] + n_ranks - 1 <= scraped["ports"][0]["endPort"]
        assert f"--port={ports['http']}" in container(pod)["args"]
        assert asked["ports"] == [{"port": ports["http"]}]


def test_the_fencing_program_may_read_pods_and_nothing_else():
    (role,) = of("Role")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    assert not of("ClusterRole")
    assert all(pod["spec"]["automountServiceAccountToken"] is False for n, pod in PODS.items() if n != "fence-pods")


def test_selectors_match_the_pods_that_they_are_for():
    labels = {name: pod["metadata"]["labels"].items() for name, pod in PODS.items()}
    for one in OBJECTS:
        if selector := one.get("spec", {}).get("selector"):
            assert selector.get("matchLabels", selector).items() <= labels[one["metadata"]["name"]]
    labels["router"] = {"app.kubernetes.io/name": "router"}.items()  # the reader's
    allowed = re.findall(r"'podSelector': {'matchLabels': ({[^{}]*})", str(of("NetworkPolicy")))
    assert len(allowed) > len(of("NetworkPolicy"))
    for selector in map(ast.literal_eval, allowed):
        assert any(selector.items() <= held for held in labels.values()), selector


def test_all_name_one_directory_of_members_that_exist():
    addresses = {word for pod in PODS.values() for word in re.findall(r"etcd://\S+", yaml.safe_dump(pod, width=9999))}
    (address,) = addresses
    etcd = next(one for one in of("StatefulSet") if one["metadata"]["name"] == "pdstage-etcd")
    members = [f"pdstage-etcd-{number}.pdstage-etcd:2379" for number in range(etcd["spec"]["replicas"])]
    assert address == f"etcd://pdstage@{','.join(members)}/pdstage"


def test_what_is_mounted_is_made_by_a_command_of_the_page_and_keys_are_private():
    wanted = set()
    for pod in PODS.values():
        names = {one["name"] for one in pod["spec"].get("volumes", ())} | {"data"}
        assert {one["name"] for one in container(pod).get("volumeMounts", ())} <= names
        for volume in pod["spec"].get("volumes", ()):
            if "secret" in volume:
                wanted.add(f"secret generic {volume['secret']['secretName']}")
                assert volume["secret"]["defaultMode"] & 0o027 == 0, "others may not read it, and nobody write it"
            if "configMap" in volume:
                wanted.add(f"configmap {volume['configMap']['name']}")
        for variable in container(pod).get("env", ()):
            if "secretKeyRef" in variable.get("valueFrom", {}):
                wanted.add(f"secret generic {variable['valueFrom']['secretKeyRef']['name']}")
    assert wanted == set(re.findall(r"^kubectl create ((?:secret generic|configmap) \S+)", PAGE, re.MULTILINE))


def test_the_page_applies_every_file():
    assert {path.name for path in FILES} == set(re.findall(r"kubernetes/(\w+\.yaml)\)", PAGE))
    assert {path.name for path in FILES} == set(re.findall(r"-f docs/kubernetes/(\w+\.yaml)", PAGE))
