"""The certificate of a verified run: certificate.json, which lists what was computed again, where, and with what."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dppo.config import Config, plain_settings
from dppo.files import sha256_of
from dppo.numerics.fingerprint import cpu_name
from dppo.records.files import checkpoint as checkpoints
from dppo.records.files.checkpoint import LoadedCheckpoint
from dppo.records.files.disk import write_file, writing
from dppo.records.files.run_files import CONFIG, METRICS, TRACE
from dppo.records.files.run_folder import versions
from dppo.tools.doctor.watching import simulator
from dppo.tools.verify.stored import Stretch

PROVES = (
    "On the machine named here, these settings and this simulator led from each named checkpoint to the next one, "
    "equal to the last bit: weights, optimizer, normalizers, samplers and metrics. The files named had these hashes."
)
PROVES_NOT = (
    "It is not signed: anybody can write this file, so trust it only as far as you trust its sender. Run dppo verify "
    "yourself. Iterations that are not named were not computed again, nor were evaluations. The simulator is "
    "identified by its packages and its first steps, not by its files. It does not say that the policy is good, nor "
    "that the simulator is right."
)
FINGERPRINT_S = 60.0


def write_certificate(
    out: Path,
    run: Path,
    newest: LoadedCheckpoint,
    config: Config,
    stretches: Sequence[Stretch],
    facts: Mapping[str, Any],
) -> None:
    """Write as JSON what was verified, with the `facts` of it; raise a ConfigError if the file cannot be written."""
    files = [run / CONFIG, run / METRICS, run / TRACE, *checkpoints.paths_in(run)]
    existing = [path for path in files if path.exists()]
    certificate = {
        "certificate": 1,
        "environment": config.env_name,
        "verified": [str(stretch) for stretch in stretches],
        "made": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        **facts,
        "machine": cpu_name(),
        "actors": config.num_actors,
        "versions": versions(),
        "simulator": simulator(plain_settings(config), FINGERPRINT_S),
        "files": {str(path.relative_to(run)): sha256_of(path) for path in existing},
        "settings": newest.checkpoint.state["config"],
        "proves": PROVES,
        "proves_not": PROVES_NOT,
    }
    with writing(f"out={out}"):
        write_file(out, json.dumps(certificate, indent=1).encode() + b"\n")
