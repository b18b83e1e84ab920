"""Variables with which NumPy and torch compute the same bits on every x86-64 machine with AVX2."""

import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dppo.files import MAX_SETTINGS_BYTES, read_file

VARIABLES = {
    "OPENBLAS_CORETYPE": "Haswell",  # matrix products: NumPy's, and through it torch's (`ppo.kernels.products`)
    # NumPy has AVX-512 versions of exp, log, sin and others. These are the names of the features in NumPy 2.4 and in
    # earlier versions; NumPy ignores names that it does not know, with the warning of UNKNOWN_FEATURES.
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL",
    # With any other value, the code that MKL runs depends on the vendor of the CPU: an AMD does not get the same code.
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "avx2",
}
# Only `numerics=strict` sets this, because it costs CNNs a third of their speed on a CPU with AVX-512.
CONVOLUTIONS = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
# the beginning of an ImportWarning, which `-W error` would raise
UNKNOWN_FEATURES = "During parsing environment variable"
SAME_AS_HASWELL = {"Haswell", "Zen"}  # cores of OpenBLAS with the same kernels
# `numerics: native` or `numerics = "native"`, at the start of a line or inside of braces
NATIVE = re.compile(
    rb"(?:^|[{,.])[ \t]*['\"]?numerics['\"]?[ \t]*[:=][ \t]*['\"]?native\b", re.MULTILINE
)


def portable_numerics(argv: Sequence[str] = ()) -> None:
    """Make last bits equal on x86-64 machines with AVX2; call it before NumPy is imported.

    The variables hold for this process and those that it starts. Commands call it with their `argv`; it does nothing
    if `argv`, a file that it names, or the variable DPPO_NUMERICS asks for native.
    """
    if "numpy" not in sys.modules and has_avx2() and not _asks_for_native(argv):
        os.environ.update(_with_filter(VARIABLES))
        warnings.filterwarnings("ignore", UNKNOWN_FEATURES, ImportWarning)


def _with_filter(variables: dict[str, str]) -> dict[str, str]:
    """Add the variable by which processes that are started ignore UNKNOWN_FEATURES, if they are to raise warnings."""
    filters = os.environ.get("PYTHONWARNINGS", "")
    if not filters or UNKNOWN_FEATURES in filters:
        return variables
    return variables | {"PYTHONWARNINGS": f"{filters},ignore:{UNKNOWN_FEATURES}:ImportWarning"}


def _asks_for_native(argv: Sequence[str]) -> bool:
    """Return whether settings ask for `numerics=native`, without loading the parsers of settings."""
    words = [part for argument in argv for part in argument.split("=", 1)]
    if "--numerics" in words:
        # the last flag wins
        last_flag = len(words) - 1 - words[::-1].index("--numerics")
        # empty if the flag has no value
        values = words[last_flag + 1 : last_flag + 2]
        return values == ["native"]
    for word in words:
        if not word:
            continue
        files = _settings_files(Path(word).absolute())
        if any(_sets_native(file) for file in files):
            return True
    return os.environ.get("DPPO_NUMERICS") == "native"


def _settings_files(path: Path) -> list[Path]:
    """Return the settings files for `path`: a settings file, the folder of a run, or a path inside of such a folder."""
    if path.suffix in (".yaml", ".yml", ".toml"):
        return [path]
    last_names = {path.name, path.parent.name}
    is_inside_run = path.suffix == ".safetensors" or last_names & {"checkpoints", "incidents"}
    folders = path.parents[:2] if is_inside_run else [path]
    return [folder / "config.yaml" for folder in folders]


def _sets_native(file: Path) -> bool:
    """Return whether a settings file sets `numerics=native`; False if it does not exist or cannot be read."""
    # RuntimeError: `resolve` met a link to itself. ValueError: the path or the file is invalid.
    with suppress(OSError, RuntimeError, ValueError):
        if file.is_file():
            content = read_file(file.resolve(), MAX_SETTINGS_BYTES)
            return NATIVE.search(content) is not None
    return False


@contextmanager
def in_force(numerics: str) -> Iterator[dict[str, str]]:
    """Set the variables while a run lasts, for libraries and processes that it loads or starts; yield those in force.

    Sets none with `numerics=native`, without AVX2, or if NumPy was loaded without them: all processes of a run must
    compute the same bits.
    """
    chosen = _with_filter(VARIABLES | (CONVOLUTIONS if numerics == "strict" else {}))
    if numerics == "native" or not has_avx2() or not numpy_is_portable():
        chosen = {}
    saved_variables = {name: os.environ[name] for name in chosen if name in os.environ}
    os.environ.update(chosen)
    try:
        yield chosen
    finally:
        for name in chosen:
            os.environ.pop(name, None)
        os.environ.update(saved_variables)


def numpy_is_portable() -> bool:
    """Return whether NumPy uses the code that the variables choose; True if NumPy has not been loaded yet."""
    if "numpy" not in sys.modules:
        return True
    import numpy as np

    from dppo.numerics.arithmetic import openblas

    extensions: dict[str, list[str]] = np.show_config(mode="dicts")["SIMD Extensions"]  # type: ignore[assignment]
    disabled = VARIABLES["NPY_DISABLE_CPU_FEATURES"].split()
    used = [*extensions.get("baseline", ()), *extensions.get("found", ())]
    cores = {library["architecture"] for library in openblas().info()}
    return cores <= SAME_AS_HASWELL and set(disabled).isdisjoint(used)


def has_avx2() -> bool:
    """Return whether this is an x86-64 machine with AVX2 and FMA; OpenBLAS would crash on another."""
    after_flags = cpu_facts().partition("flags")[2]
    first_line = after_flags.partition("\n")[0]
    return {"avx2", "fma"} <= set(first_line.split())


def cpu_facts() -> str:
    """Read Linux's /proc/cpuinfo; "" elsewhere."""
    with suppress(OSError):
        return Path("/proc/cpuinfo").read_text("utf8")
    return ""
