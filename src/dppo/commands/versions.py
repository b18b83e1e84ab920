"""Find packages in the launcher's `.venv` that are not those that it has installed."""

import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

CORE = ("gymnasium", "numpy", "ray", "torch")


def other_versions() -> tuple[str, bool] | None:
    """Return which packages have other versions than pinned, with the remedy, and whether dppo cannot work with them.

    None if all are as pinned, or Python is not that of a `.venv` made by `./dppo`. Reads two or three small files.
    """
    venv = Path(sys.prefix)
    if not (venv / ".dppo-ready").exists():
        return None
    pins: dict[str, list[str]] = {}  # several of a package, if they depend on the version of Python
    for name, pin in re.findall(r"^([\w.-]+)==([^\s;]+)", (venv.parent / "constraints.txt").read_text(), re.MULTILINE):
        pins.setdefault(name, []).append(pin)
    found, broken = list[str](), list[str]()
    for package in CORE:
        try:
            has = version(package)
        except PackageNotFoundError:
            has = "none"
        if package in pins and has.partition("+")[0] not in pins[package]:
            found.append(f"{package} {has} instead of {' or '.join(pins[package])}")
            broken += [package] * (not _is_supported(package, has))
    if not found:
        return None
    not_working = f"dppo does not work with {', '.join(broken)} of that version"
    effect = not_working if broken else "it is tested with the latter"
    repair = f"cd {venv.parent} && {venv.name}/bin/python -m pip install -c constraints.txt -e '.[test]'"
    fact = f"{venv} has {', '.join(found)}; {effect}. Something else was installed there. Repair it: {repair}"
    return fact, bool(broken)


def _is_supported(package: str, has: str) -> bool:
    """Return whether a version is in the range that dppo asks for."""
    from packaging.requirements import Requirement

    asked = [Requirement(text) for text in requires("dppo") or ()]
    return has != "none" and all(one.specifier.contains(has, prereleases=True) for one in asked if one.name == package)
