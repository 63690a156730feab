"""The Helm chart of ``deploy/helm``, rendered by Helm's own library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trencadis.server.cli import engine_config, flag_parser, server_settings

helm = pytest.importorskip("helm_python")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

DEPLOY = Path(__file__).parents[3] / "deploy"
CHART = DEPLOY / "helm"
GIVEN = {
    "image": "trencadis-gaudi",
    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "keys": {"api": "replace-me", "admin": "replace-me-too"},
}

KUBERNETES = ("1.30", "1.37")
"""The oldest and the newest version whose schemas of objects are used."""

INFO = 1
"""The severity of what ``helm lint`` only recommends."""


def of_device(device: str) -> dict[str, Any]:
    return {**yaml.safe_load((CHART / f"values-{device}.yaml").read_text()), **GIVEN}


def rendered(values: dict[str, Any], name: str = "engine-serve") -> dict[str, dict[str, Any]]:
    """The objects of an installation, by their kind."""
    chart = helm.Chart.load(CHART)
    chart.validate_schema(values)
    texts = chart.render(values, name=name).values()
    objects = [found for text in texts for found in yaml.safe_load_all(text) if found]
    return {each["kind"]: each for each in objects}


def test_on_a_gaudi_it_is_the_file_for_kubectl() -> None:
    file = yaml.safe_load_all((DEPLOY / "kubernetes" / "engine-serve.yaml").read_text())
    assert rendered(of_device("gaudi")) == {each["kind"]: each for each in file}


@pytest.mark.parametrize("device", ["gaudi", "cuda", "cpu"])
def test_kubernetes_and_the_server_accept_what_each_device_has(
    device: str,
) -> None:
    values = of_device(device) | {
        "flags": [*of_device(device).get("flags", []), "--max-num-seqs=64"],
        "env": {"OMP_NUM_THREADS": "8"},
        "labels": {"llm-d.ai/engine-type": "vllm"},
        "secret": "keys",
        "cacheClaim": "models",
        "shutdownSeconds": 20,
    }
    objects = rendered(values, name="small")
    assert set(objects) == {"Service", "Deployment"}  # the Secret is there already
    for each in objects.values():
        for version in KUBERNETES:
            kubernetes_validate.validate(each, version, strict=True)
    template = objects["Deployment"]["spec"]["template"]
    selector = objects["Service"]["spec"]["selector"]
    assert selector == objects["Deployment"]["spec"]["selector"]["matchLabels"]
    assert template["metadata"]["labels"] == {**selector, **values["labels"]}
    assert template["spec"]["terminationGracePeriodSeconds"] == 115
    assert template["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == "models"
    (container,) = template["spec"]["containers"]
    assert container["resources"] == values["resources"]
    assert {"name": "OMP_NUM_THREADS", "value": "8"} in container["env"]
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    args = flag_parser().parse_args(container["args"])
    settings = server_settings(args, {"VLLM_ADMIN_TOKEN": "token"})
    config = engine_config(args, {})
    assert (settings.shutdown_timeout, config.max_num_seqs) == (20, 64)
    assert config.device == ("cpu" if device == "cpu" else "auto")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": ""}, "/model"),
        ({"image": ""}, "/image"),
        ({"replica": 2}, "replica"),
        ({"strategy": "None"}, "/strategy"),
        ({"flags": ["max-num-seqs=64"]}, "/flags/0"),
        ({"drainSeconds": "60s"}, "/drainSeconds"),
        ({"labels": {"app": "mine"}}, "invalid propertyName"),  # that of the selector
        ({"keys": {"api": "key"}}, "keys.admin must be set, or secret"),
        ({"keys": {}}, "keys.api must be set, or secret"),
    ],
)
def test_values_without_a_meaning_are_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=message):
        rendered({**GIVEN, **change})


def test_helm_finds_no_fault() -> None:
    found = helm.chart.lint(CHART, GIVEN, strict=True)
    assert [each for each in found["messages"] if each["severity"] > INFO] == []
    assert found["errors"] == []
