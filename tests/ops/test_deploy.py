"""Unit, container and manifests: what they run is understood, what they set exists, they are as closed as they say."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from daemon.front.supervisor import SHUTDOWN_WAIT_S
from tests.ops.commands import check_command, settings_in, settings_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "ops" / "deploy"
BIN = "/opt/downcore/bin/"
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def unit() -> Iterator[tuple[str, str, str]]:
    """Section, name and value of each line."""
    section = ""
    for line in (DEPLOY / "downcore.service").read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            yield section, name, value


def service(name: str) -> list[str]:
    """All values of a setting of the unit's service."""
    return [value for section, key, value in unit() if (section, key) == ("Service", name)]


def test_the_unit_runs_what_there_is_with_settings_that_exist() -> None:
    commands = [value for _, name, value in unit() if name.startswith("Exec") and BIN in value]
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command.replace(BIN, ""))
        assert words[0] in SCRIPTS
        check_command(words)
    settings_in(dict(value.split("=", 1) for value in service("Environment")))
    assert (service("Type"), service("KillMode")) == (["notify"], ["mixed"])
    assert float(service("WatchdogSec")[0]) >= 10


def test_the_unit_waits_until_what_is_dirty_is_written() -> None:
    config = settings_of(DEPLOY / "downcore.toml")
    needed_s = config.drain_window_s + config.engine.flush_window_s + SHUTDOWN_WAIT_S
    assert float(service("TimeoutStopSec")[0]) > needed_s
    assert config.engine.disk_path.startswith(f"/var/lib/{service('StateDirectory')[0]}/")
    (listen,) = (value.split("=", 1)[1] for value in service("Environment") if "LISTEN" in value)
    assert listen.startswith(f"/run/{service('RuntimeDirectory')[0]}/")
    assert service("RuntimeDirectoryMode") == ["0700"], "the daemon refuses a folder that others may enter"


def test_the_unit_is_closed() -> None:
    found = {name: value for _, name, value in unit()}
    yes = (
        "DynamicUser NoNewPrivileges ProtectHome PrivateTmp ProtectKernelModules ProtectKernelTunables "
        "ProtectControlGroups RestrictNamespaces RestrictSUIDSGID LockPersonality"
    )
    assert {name: found.get(name) for name in yes.split()} == dict.fromkeys(yes.split(), "yes")
    assert found["CapabilityBoundingSet"] == ""
    assert found["ProtectSystem"] == "strict"
    assert found["LimitCORE"] == "0"
    assert found["OOMPolicy"] == "continue"
    assert "MemoryDenyWriteExecute" not in found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_takes_the_unit_and_finds_it_closed(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in SCRIPTS:
        (folder / name).symlink_to(sys.executable)
    path = tmp_path / "downcore.service"
    path.write_text((DEPLOY / "downcore.service").read_text().replace(BIN, f"{folder}/"))
    verified = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=25", "--no-pager", str(path)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0, "exposure is above 2.5"


def instructions() -> Iterator[tuple[str, str]]:
    """Name and rest of each instruction of the Containerfile."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Containerfile").read_text(), flags=re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            yield name, re.sub(r"\s+", " ", rest.strip())


def test_the_container_has_two_stages_no_weights_and_no_root() -> None:
    found = list(instructions())
    stages = [number for number, (name, _) in enumerate(found) if name == "FROM"]
    assert len(stages) == 2
    last = found[stages[1] :]
    copied = [rest for name, rest in last if name == "COPY"]
    assert copied == ["--from=build /opt/downcore /opt/downcore"], "only what was installed is in the image"
    (user,) = (rest for name, rest in last if name == "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number, so that runAsNonRoot can be checked"
    built = [rest for name, rest in found[: stages[1]] if name == "RUN"]
    removal = next(number for number, rest in enumerate(built) if "find ops/models" in rest and "rm -r" in rest)
    assert built[removal].index("find ops/models") < built[removal].index("pip install")
    for name, rest in found[: stages[1]]:
        if name == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"][
        "packages"
    ]
    assert {package.split("/")[0] for package in packages} <= {
        rest.split()[0] for name, rest in found if name == "COPY"
    }, "what the wheel is made of"


def test_the_container_removes_every_model_that_comes_along(tmp_path: Path) -> None:
    """The very command of the Containerfile, on a folder like ours."""
    models = tmp_path / "ops" / "models"
    models.joinpath("tiny-hybrid").mkdir(parents=True)
    models.joinpath("tiny-hybrid", "model.safetensors").touch()
    models.joinpath("shipped.py").touch()
    (removal,) = (rest.split(" && ")[0] for name, rest in instructions() if name == "RUN" and "find ops/models" in rest)
    subprocess.run(["sh", "-ec", removal], cwd=tmp_path, check=True)
    assert [path.name for path in models.iterdir()] == ["shipped.py"]


def test_what_the_container_runs_and_sets_exists() -> None:
    found = list(instructions())
    (entry,) = (json.loads(rest) for name, rest in found if name == "ENTRYPOINT")
    assert entry[0] in SCRIPTS
    (health,) = (rest for name, rest in found if name == "HEALTHCHECK")
    check_command(json.loads(health[health.index("[") :]))
    (environment,) = (rest for name, rest in found if name == "ENV")
    settings_in(dict(pair.split("=", 1) for pair in environment.split()))


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    text = (DEPLOY / "kubernetes" / "downcore.yaml").read_text()
    found = [document for document in yaml.safe_load_all(text) if document]
    assert len({document["kind"] for document in found}) == len(found)
    return {document["kind"]: document for document in found}


def pod(manifests: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod's specification and its one container."""
    spec = manifests["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


def commands_of(value: Any) -> Iterator[list[str]]:
    """Every `command` below a value."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "command":
                yield inner
            else:
                yield from commands_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from commands_of(inner)


def test_every_command_of_the_manifests_is_understood(manifests: dict[str, Any]) -> None:
    found = list(commands_of(manifests["StatefulSet"]))
    assert len(found) == 4
    for command in found:
        check_command(command)
    _, container = pod(manifests)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        words = container[probe]["exec"]["command"]
        assert words[1] == "ping", "a gRPC health check"
        assert float(words[-1]) < container[probe]["timeoutSeconds"]
        assert ("--live" in words) is (probe == "livenessProbe"), "who drains or loads is not to be killed for it"
    assert container["lifecycle"]["preStop"]["exec"]["command"][:3] == ["downcore", "drain", "--yes"]


def test_the_settings_of_the_manifests_are_a_configuration(manifests: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "downcore.toml"
    path.write_text(manifests["ConfigMap"]["data"]["downcore.toml"])
    config = settings_of(path)
    spec, container = pod(manifests)
    environment = {pair["name"]: pair["value"] for pair in container["env"]}
    settings_in(environment)
    assert environment["DOWNCORE_SERVER"] == environment["DOWNCORE_FRONT__LISTEN"] == config.listen
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert environment["DOWNCORE_CONFIG"] == mounts["config"]
    for needed in (config.tls_cert_file, config.tls_key_file, config.principals_file, config.engine.model_path,
                   config.engine.disk_path, config.listen):  # fmt: skip
        assert any(needed.startswith(mount + "/") for mount in mounts.values()), needed
    assert Path(config.listen).parent != Path(mounts["run"]), "a folder of its own: a volume's is open to its group"
    volumes = {volume["name"] for volume in spec["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in manifests["StatefulSet"]["spec"]["volumeClaimTemplates"]}
    assert set(mounts) == volumes
    wait_s = float(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    needed_s = wait_s + config.drain_window_s + config.engine.flush_window_s + SHUTDOWN_WAIT_S
    assert spec["terminationGracePeriodSeconds"] > needed_s
    (claim,) = manifests["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) << 30 > config.engine.disk_bytes


def test_the_pod_is_closed_and_reached_where_it_listens(manifests: dict[str, Any]) -> None:
    spec, container = pod(manifests)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    (user,) = (rest for name, rest in instructions() if name == "USER")
    assert user == f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}"
    labels = manifests["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    for kind, selector in (
        ("Service", manifests["Service"]["spec"]["selector"]),
        ("StatefulSet", manifests["StatefulSet"]["spec"]["selector"]["matchLabels"]),
        ("PodDisruptionBudget", manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]),
        ("NetworkPolicy", manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]),
    ):
        assert selector.items() <= labels.items(), kind
    (port,) = container["ports"]
    assert f':{port["containerPort"]}"' in manifests["ConfigMap"]["data"]["downcore.toml"]
    assert manifests["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
