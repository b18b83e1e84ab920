"""Variables with which NumPy and torch compute the same bits on every x86-64 machine with AVX2."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from dppo.files import MAX_SETTINGS_BYTES, read_file

VARIABLES = {
    "OPENBLAS_CORETYPE": "Haswell",  # matrix products: NumPy's, and through it torch's (`ppo.kernels.products`)
    # exp, log, sin and others have versions for AVX-512. Names of NumPy 2.4, and of those before; others are ignored.
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL",
    # Every other branch of MKL depends on the vendor of the CPU, whatever the variable says on an AMD.
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "avx2",
}
# costs a third of the speed of CNNs where the CPU has AVX-512
CONVOLUTIONS = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
SAME_AS_HASWELL = {"Haswell", "Zen"}  # cores of OpenBLAS with the same kernels
NATIVE = re.compile(
    rb"(?:^|[{,.])[ \t]*['\"]?numerics['\"]?[ \t]*[:=][ \t]*['\"]?native\b",
    re.MULTILINE,
)


def portable_numerics(argv: Sequence[str] = ()) -> None:
    """Set the variables for this process and those that it starts; without effect once NumPy is loaded.

    Call it first in a program that imports NumPy or torch before it calls dppo. Commands call it with their `argv`; it
    does nothing if `argv`, a file that it names, or the variable DPPO_NUMERICS asks for native.
    """
    if "numpy" not in sys.modules and has_avx2() and not _native(argv):
        os.environ.update(VARIABLES)


def _native(argv: Sequence[str]) -> bool:
    """Return whether settings ask for `numerics=native`, without loading the parsers of settings."""
    words = [part for word in argv for part in word.split("=", 1)]
    if "--numerics" in words:
        last_flag = len(words) - 1 - words[::-1].index("--numerics")  # the last one wins
        return words[last_flag + 1 : last_flag + 2] == ["native"]
    for word in words:
        if word and any(_says_native(file) for file in _settings_files(Path(word).absolute())):
            return True
    return os.environ.get("DPPO_NUMERICS") == "native"


def _settings_files(path: Path) -> list[Path]:
    """Return the files with settings that `path` may stand for: a file, a run's folder, or something inside of one."""
    if path.suffix in (".yaml", ".yml", ".toml"):
        return [path]
    is_inside_run = path.suffix == ".safetensors" or {
        "checkpoints",
        "incidents",
    } & {path.name, path.parent.name}
    folders = path.parents[:2] if is_inside_run else [path]
    return [folder / "config.yaml" for folder in folders]


def _says_native(file: Path) -> bool:
    with suppress(OSError, RuntimeError, ValueError):  # not a file, or a link to itself
        return (
            file.is_file()
            and NATIVE.search(read_file(file.resolve(), MAX_SETTINGS_BYTES)) is not None
        )
    return False


@contextmanager
def in_force(numerics: str) -> Iterator[dict[str, str]]:
    """Set the variables while a run lasts, for libraries and processes that it loads or starts; yield those in force.

    Sets none with `numerics=native`, without AVX2, or if NumPy was loaded with others: processes must compute alike.
    """
    chosen = VARIABLES | (CONVOLUTIONS if numerics == "strict" else {})
    if numerics == "native" or not has_avx2() or not numpy_is_portable():
        chosen = {}
    before = {name: os.environ[name] for name in chosen if name in os.environ}
    os.environ.update(chosen)
    try:
        yield chosen
    finally:
        for name in chosen:
            os.environ.pop(name, None)
        os.environ.update(before)


def numpy_is_portable() -> bool:
    """Return whether NumPy computes as with the variables, or will when it is loaded."""
    if "numpy" not in sys.modules:
        return True
    features = import_module("numpy._core._multiarray_umath").__cpu_features__
    cores = {library["architecture"] for library in _blas().info()}
    return cores <= SAME_AS_HASWELL and not features.get("AVX512_SKX", False)


def has_avx2() -> bool:
    """Return whether this is an x86-64 machine with AVX2 and FMA; OpenBLAS would crash on another."""
    return {"avx2", "fma"} <= set(cpu_facts().partition("flags")[2].partition("\n")[0].split())


def cpu_facts() -> str:
    """Return the content of Linux's /proc/cpuinfo; "" elsewhere."""
    with suppress(OSError):
        return Path("/proc/cpuinfo").read_text("utf8")
    return ""


def limit_blas(threads: int) -> Any:
    """Limit NumPy's matrix products to `threads`, so that sums have one order; `restore_original_limits` undoes it."""
    return _blas().limit(limits=threads)


@cache
def _blas() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(internal_api="openblas")
