"""The job scripts of docs/CLUSTER.md: a manifest for KubeRay, and `ray job submit`. `test_slurm.py` runs Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import pytest
import yaml
from commandline import fresh_environment, parse

from dppo.config import Config

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""


def test_a_job_whose_ray_does_not_start_says_so_and_fails(tmp_path: Path) -> None:
    programs = {"srun": SRUN, "ray": "#!/bin/bash\nexit 1\n", "hostname": "#!/bin/bash\necho h1\n"}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"HOME": str(tmp_path), "PATH": path, "SLURM_JOB_NUM_NODES": "1"}
    words = ["bash", str(EXAMPLES / "slurm.sh"), "CartPole-v1"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout == "Ray has not started on h1 in 3 attempts.\n"


def manifests() -> list[Any]:
    """Return the manifests for Kubernetes in examples/ and in the pages of docs/."""
    texts = [page.read_text(encoding="utf8") for page in EXAMPLES.glob("*.yaml")]
    for page in (ROOT / "docs").glob("*.md"):
        texts += re.findall(
            r"^```ya?ml\n(.*?)^```$", page.read_text(encoding="utf8"), re.MULTILINE | re.DOTALL
        )
    documents = [
        document for text in texts if "apiVersion:" in text for document in yaml.safe_load_all(text)
    ]
    assert documents
    return documents


def test_manifests_have_the_schema_of_kuberay_and_start_a_valid_run() -> None:
    path = Path(__file__).with_name("kuberay_schema.yaml")
    schema = yaml.safe_load(path.read_text(encoding="utf8"))
    jsonschema.Draft7Validator.check_schema(schema)
    valid = jsonschema.Draft7Validator(schema)
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf8")
    for job in manifests():
        errors = [f"{error.json_path}: {error.message}" for error in valid.iter_errors(job)]
        assert errors == []
        spec = job["spec"]
        cluster = spec["rayClusterSpec"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            pod = group["template"]["spec"]
            volumes = {volume["name"] for volume in pod["volumes"]}
            for container in pod["containers"]:
                mounts = {mount["name"] for mount in container["volumeMounts"]}
                assert mounts == volumes
        assert f"ray=={cluster['rayVersion']}\n" in constraints
        words = spec["entrypoint"].split()
        assert words[:4] == ["python", "-m", "dppo", "train"]
        config = Config(**parse(words[4:]).settings)
        assert config.num_actors == "auto"
        assert str(config.run_dir) == "/runs/first"


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("aiohttp_cors") is None, reason="needs ray[default]: pip install '.[cluster]'"
)
def test_a_job_that_is_submitted_trains_on_the_cluster_with_the_module_of_its_folder(
    tmp_path: Path,
) -> None:
    """On a head of its own, in a PID namespace of its own, because `ray stop` ends every Ray that it sees."""
    (tmp_path / "mysim.py").write_text(
        "import gymnasium\n\ndef make():\n    return gymnasium.make('CartPole-v1')\n"
    )
    train = "python -m dppo train mysim:make --num-samplers 2 --num-actors 2 --num-steps 64 --total-timesteps 512"
    script = f"""
        ray start --head --port 6998 --num-cpus 2 --dashboard-port 8298 || exit 1
        ray job submit --address http://127.0.0.1:8298 --working-dir . -- \
            {train} --address auto --progress plain --run-dir {tmp_path}/run
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = fresh_environment(PATH=path, PYTHONPATH=os.pathsep.join(sys.path))
    (tmp_path / "token").write_text("0123456789abcdef" * 4)
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    namespaces = ["--mount", "--pid", "--mount-proc", "--kill-child"]  # nothing outlives a timeout
    words = ["unshare", *namespaces, "bash", "-c", script]
    with TemporaryDirectory(dir="/tmp") as short_folder:
        env["RAY_TMPDIR"] = short_folder
        done = subprocess.run(
            words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280, check=False
        )
    assert "Done after 512 steps" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "run" / "learning_curve.png").exists()
