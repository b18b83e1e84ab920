"""Remedies for a cluster that has other versions than this process."""

import re

MISMATCH = re.compile(r"Version mismatch.*?Ray: (\S+) Python: (\S+).*?Ray: (\S+) Python: (\S+)")


def versions_remedy(reason: str) -> str:
    """Return what to install if `reason`, an error of Ray in a line, is about versions that differ; else ""."""
    mismatch = MISMATCH.search(" ".join(reason.split()))
    if mismatch is None:
        return ""
    cluster_ray, cluster_python, ray_here, python_here = mismatch.groups()
    steps = []
    if cluster_ray != ray_here:
        steps.append(
            f"install the cluster's Ray here, `pip install ray=={cluster_ray}`, or {ray_here} on its nodes"
        )
    if cluster_python != python_here:
        steps.append(_python_step(cluster_python, python_here))
    return "The versions differ: " + "; and ".join(steps) + "."


def _python_step(cluster: str, here: str) -> str:
    if cluster.split(".")[:2] != here.split(".")[:2]:
        return f"run this process with Python {cluster} as the cluster, or the cluster with {here}"
    alike = "these two work together, if RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL=minor is set here and on the nodes"
    return f"Python is {here} here and {cluster} in the cluster: {alike}"
