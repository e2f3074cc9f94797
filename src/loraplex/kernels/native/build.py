"""Build the native CPU operations once for this machine and load them.

The library has a plain C interface and no torch headers, so it builds in seconds and serves every torch version. It is
kept in the user's cache folder under a name that covers sources, flags, compiler and processor.
"""

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import platformdirs


class NativeUnavailable(RuntimeError):
    """The native operations cannot be built or loaded here; the message says why."""


SOURCES = ("gemm.cpp", "lora.cpp", "attention.cpp")
HEADERS = ("attention_amx.h", "common.h", "threads.h")
FLAGS = ("-O3", "-march=native", "-pthread", "-fPIC", "-std=c++17", "-w")
REQUIRED_CPU_FLAGS = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_bf16"})


def cpu_flags() -> frozenset[str]:
    """Instruction sets of this processor, as Linux names them; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "").split())


def find_compiler() -> str:
    """Path of a C++ compiler: $CXX, else g++ or clang++. Raises NativeUnavailable when there is none."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++")):
        path = shutil.which(name)
        if path:
            return path
    raise NativeUnavailable("No C++ compiler found (tried $CXX, g++, clang++); install g++ for the native CPU kernels.")


def _cache_key(compiler: str, folder: Path) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout  # noqa: S603
    digest = hashlib.sha256(version)
    for text in (platform.machine(), *FLAGS, *sorted(cpu_flags())):
        digest.update(text.encode() + b"\0")
    for name in SOURCES + HEADERS:
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()[:20]


def build_library(cache_dir: Path | None = None) -> Path:
    """Path of the library, built if this machine has not built these sources yet. Raises NativeUnavailable.

    Where the cache folder cannot be written, each process builds its own.
    """
    missing = REQUIRED_CPU_FLAGS - cpu_flags()
    if missing:
        raise NativeUnavailable(
            f"The native CPU kernels need {', '.join(sorted(missing))}, which this processor lacks."
        )
    folder = Path(__file__).parent
    compiler = find_compiler()
    cache = cache_dir or platformdirs.user_cache_path("loraplex") / "native"
    name = f"libloraplex-{_cache_key(compiler, folder)}.so"
    try:
        return _build_in(cache, name, compiler, folder)
    except OSError as error:
        problem = f"{cache} ({error.strerror})"
    try:
        return _build_in(_private_folder(), name, compiler, folder)
    except OSError as error:
        raise NativeUnavailable(
            f"The native CPU kernels can be written neither to {problem} nor to a temporary directory "
            f"({error.strerror}); set XDG_CACHE_HOME to a folder that can be written."
        ) from error


def _build_in(cache: Path, name: str, compiler: str, folder: Path) -> Path:
    target = cache / name
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _compile(compiler, folder, target)
    return target


@functools.cache
def _private_folder() -> Path:
    """A folder that only this process uses, removed when it ends."""
    path = tempfile.mkdtemp(prefix="loraplex-native-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


def _compile(compiler: str, folder: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = []
        for source in SOURCES:
            objects.append(f"{scratch}/{source}.o")
            _run([compiler, *FLAGS, "-c", str(folder / source), "-o", objects[-1]])
        built = Path(scratch) / "built.so"
        _run([compiler, "-shared", "-pthread", *objects, "-o", str(built)])
        built.replace(target)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise NativeUnavailable(f"Building the native CPU kernels failed: {' '.join(command)}\n{done.stderr[-2000:]}")


def load_library() -> ctypes.CDLL:
    """Build if needed and load. Raises NativeUnavailable."""
    path = build_library()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"Loading {path} failed: {error}") from error
