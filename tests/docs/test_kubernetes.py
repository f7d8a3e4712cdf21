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
FILES = {engine: sorted([*FOLDER.glob("*.yaml"), *FOLDER.glob(f"{engine}/*.yaml")]) for engine in ("vllm", "sglang")}
Object = dict[str, Any]
OBJECTS: dict[str, list[Object]] = {
    engine: [one for path in paths for one in yaml.safe_load_all(path.read_text())] for engine, paths in FILES.items()
}
"""What is applied for an engine."""
PODS = {
    engine: {one["metadata"]["name"]: one["spec"]["template"] for one in objects if "template" in one.get("spec", {})}
    for engine, objects in OBJECTS.items()
}
READERS = {"fence-pods", "router"}
"""Who may ask Kubernetes."""
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
either_engine = pytest.mark.parametrize("engine", OBJECTS)
either_role = pytest.mark.parametrize("role", ["prefill", "decode"])


def of(engine: str, kind: str) -> list[Object]:
    return [one for one in OBJECTS[engine] if one["kind"] == kind]


@pytest.mark.parametrize(
    "one",
    [one for engine in OBJECTS for one in OBJECTS[engine] if one["kind"] != "PodMonitor"],
    ids=lambda one: f"{one['kind']} {one['metadata']['name']}",
)
def test_kubernetes_schema_takes_it(one):
    checker = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for version in ("1.29", "1.33"):
        checker.validate(one, version, strict=True)


def container(pod: Object) -> Object:
    (one,) = pod["spec"]["containers"]
    return one


@either_engine
@either_role
def test_the_hook_drains_the_node_and_fits_into_the_grace_period(engine, role):
    pod = PODS[engine][role]
    one = container(pod)
    shell, flag, script = one["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, flag) == ("/bin/sh", "-c")
    sleep, _, command = script.partition("; exec pdstage ")
    keys = options(one)["keys"]
    words = [{"$DIRECTORY": "etcd://a:1/p", keys: __file__}.get(word, word) for word in shlex.split(command)]
    given = cli.parser().parse_args(words)
    assert (given.command, given.endpoints, given.directory) == ("drain", ["$PDSTAGE_POD"], "etcd://a:1/p")
    assert {"PDSTAGE_POD", "DIRECTORY"} <= {one["name"] for one in one["env"]}
    assert options(one)["directory"] == "$(DIRECTORY)"
    assert str(given.keys) == __file__, "it is let in by the node's own keys"
    patience = sum(float(word.partition("=")[2]) for word in one["args"] if word.startswith("--shutdown-timeout="))
    assert float(sleep.split()[1]) + given.wait + patience < pod["spec"]["terminationGracePeriodSeconds"]


def options(engine: Object) -> Object:
    """What it gives its nodes."""
    for one in engine["args"]:
        if one.startswith("--kv-transfer-config="):
            return json.loads(one.partition("=")[2])["kv_connector_extra_config"]
    (one,) = (variable["value"] for variable in engine["env"] if variable["name"] == "PDSTAGE_NODE")
    return json.loads(one)


@either_role
def test_only_what_is_an_engine_s_own_differs(role):
    """Who mends one of the two files mends both."""
    shared = []
    for engine in OBJECTS:
        (path,) = (path for path in FILES[engine] if path.stem == role)
        one, *others = yaml.safe_load_all(path.read_text())
        pod = one["spec"]["template"]
        pod["metadata"].pop("annotations", None)
        for own in ("image", "command", "args"):
            del container(pod)[own]
        container(pod)["env"] = [
            variable for variable in container(pod)["env"] if not re.search("HOST_IP|NODE", variable["name"])
        ]
        container(pod)["ports"] = [port for port in container(pod)["ports"] if port["name"] != "bootstrap"]
        shared.append([one, *others])
    assert shared[0] == shared[1]


@either_engine
def test_ports_of_engines_and_of_policies_are_the_same(engine):
    policy = next(one for one in of(engine, "NetworkPolicy") if one["metadata"]["name"] == "pdstage")
    _, scraped, asked = policy["spec"]["ingress"]
    router = container(PODS[engine]["router"])["args"]
    for role in ("prefill", "decode"):
        pod = PODS[engine][role]
        one = container(pod)
        ports = {port["name"]: port["containerPort"] for port in one["ports"]}
        assert options(one)["metrics_port"] == ports["metrics"] == scraped["ports"][0]["port"]
        n_ranks = int(one["resources"]["limits"]["nvidia.com/gpu"])
        (monitor,) = (
            one["spec"]
            for one in of(engine, "PodMonitor")
            if one["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
        )
        assert monitor["podMetricsEndpoints"] == [{"portNumber": ports["metrics"] + rank} for rank in range(n_ranks)]
        assert {f"--tensor-parallel-size={n_ranks}", f"--tp-size={n_ranks}"} & set(one["args"])
        assert ports["metrics"] + n_ranks - 1 <= scraped["ports"][0]["endPort"]
        assert f"--port={ports['http']}" in one["args"]
        assert f"--service-discovery-port={ports['http']}" in router
        assert f"app.kubernetes.io/name={role}" == router[router.index(f"--{role}-selector") + 1]
        assert asked["ports"] == [{"port": ports["http"]}]
        if "bootstrap" in ports:
            assert f"--disaggregation-bootstrap-port={ports['bootstrap']}" in one["args"]
            assert pod["metadata"]["annotations"] == {"sglang.ai/bootstrap-port": str(ports["bootstrap"])}


@either_engine
def test_who_asks_kubernetes_may_read_pods_and_nothing_else(engine):
    roles = of(engine, "Role")
    assert {role["metadata"]["name"] for role in roles} == READERS
    for role in roles:
        assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    assert not of(engine, "ClusterRole")
    for name, pod in PODS[engine].items():
        assert pod["spec"].get("serviceAccountName") == (name if name in READERS else None)
        assert name in READERS or pod["spec"]["automountServiceAccountToken"] is False


@either_engine
def test_selectors_match_the_pods_that_they_are_for(engine):
    labels = {name: pod["metadata"]["labels"].items() for name, pod in PODS[engine].items()}
    for one in OBJECTS[engine]:
        if selector := one.get("spec", {}).get("selector"):
            assert selector.get("matchLabels", selector).items() <= labels[one["metadata"]["name"]]
    policies = of(engine, "NetworkPolicy")
    allowed = re.findall(r"'podSelector': {'matchLabels': ({[^{}]*})", str(policies))
    assert len(allowed) > len(policies)
    for selector in map(ast.literal_eval, allowed):
        assert any(selector.items() <= held for held in labels.values()), selector


@either_engine
def test_all_name_one_directory_of_members_that_exist(engine):
    pods = PODS[engine].values()
    (address,) = {word for pod in pods for word in re.findall(r"etcd://\S+", yaml.safe_dump(pod, width=9999))}
    etcd = next(one for one in of(engine, "StatefulSet") if one["metadata"]["name"] == "pdstage-etcd")
    names = [f"pdstage-etcd-{number}.pdstage-etcd" for number in range(etcd["spec"]["replicas"])]
    members = ",".join(f"{name}:2379" for name in names)
    assert address == f"etcd://pdstage@{members}/pdstage?ca=/etcd/tls.crt"
    assert f'"subjectAltName={",".join(f"DNS:{name}" for name in names)}"' in PAGE


@either_engine
def test_what_is_mounted_is_made_by_a_command_of_the_page_and_keys_are_private(engine):
    wanted = set()
    for name, pod in PODS[engine].items():
        names = {one["name"] for one in pod["spec"].get("volumes", ())} | {"data"}
        assert {one["name"] for one in container(pod).get("volumeMounts", ())} <= names
        for volume in pod["spec"].get("volumes", ()):
            if "secret" in volume:
                secret = volume["secret"]
                kind = "tls" if secret["secretName"] == "pdstage-etcd-tls" else "generic"
                wanted.add(f"secret {kind} {secret['secretName']}")
                if kind == "tls" and name != "pdstage-etcd":
                    assert secret["items"] == [{"key": "tls.crt", "path": "tls.crt"}], "the key is etcd's alone"
                else:
                    assert secret["defaultMode"] & 0o027 == 0, "others may not read it, and nobody write it"
            if "configMap" in volume:
                wanted.add(f"configmap {volume['configMap']['name']}")
        for variable in container(pod).get("env", ()):
            if "secretKeyRef" in variable.get("valueFrom", {}):
                wanted.add(f"secret generic {variable['valueFrom']['secretKeyRef']['name']}")
    assert wanted == set(re.findall(r"^kubectl create ((?:secret \w+|configmap) \S+)", PAGE, re.MULTILINE))


def test_the_page_names_and_applies_every_file():
    files = {path.relative_to(FOLDER).as_posix() for paths in FILES.values() for path in paths}
    assert files == set(re.findall(r"\(kubernetes/([\w/]+\.yaml)\)", PAGE))
    applied = set(
        re.findall(r"docs/kubernetes/([\w/.]+)", " ".join(re.findall(r"^kubectl apply .*", PAGE, re.MULTILINE)))
    )
    assert all(applied & {one, one.split("/")[0]} for one in files)
