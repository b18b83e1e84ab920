"""Find packages in the launcher's `.venv` that are not those that it has installed."""

import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

CORE = ("gymnasium", "numpy", "ray", "torch")


def other_versions() -> tuple[str, bool] | None:
    """Return which packages have other versions than pinned, with the remedy, and whether dppo cannot work with them.

    None if all are as pinned, or Python does not run in a `.venv` made by `./dppo`. Reads two or three small files.
    """
    venv = Path(sys.prefix)
    if not (venv / ".dppo-ready").exists():
        return None
    pins: dict[str, list[str]] = {}  # several of a package, if they depend on the version of Python
    for name, pin in re.findall(
        r"^([\w.-]+)==([^\s;]+)", (venv.parent / "constraints.txt").read_text(), re.MULTILINE
    ):
        pins.setdefault(name, []).append(pin)
    differences = []
    unsupported = []
    for package in CORE:
        installed = _installed(package)
        if package in pins and installed.partition("+")[0] not in pins[package]:
            differences.append(f"{package} {installed} instead of {' or '.join(pins[package])}")
            if not _is_supported(package, installed):
                unsupported.append(package)
    if not differences:
        return None
    effect = "it is tested with the latter"
    if unsupported:
        effect = f"dppo does not work with {', '.join(unsupported)} of that version"
    repair = (
        f"cd {venv.parent} && {venv.name}/bin/python -m pip install -c constraints.txt -e '.[test]'"
    )
    fact = f"{venv} has {', '.join(differences)}; {effect}. Something else was installed there. Repair it: {repair}"
    return fact, bool(unsupported)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _is_supported(package: str, installed: str) -> bool:
    from packaging.requirements import Requirement

    if installed == "none":
        return False
    requirements = [Requirement(text) for text in requires("dppo") or ()]
    ranges = [requirement.specifier for requirement in requirements if requirement.name == package]
    return all(versions.contains(installed, prereleases=True) for versions in ranges)
