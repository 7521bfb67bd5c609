"""Apply, check or revert this repository's patches to an unpacked SGLang wheel.

    python -m sglang_tetris.tools.patch --wheel DIR apply|check|revert

DIR holds the `sglang` package and its `.dist-info`: an unpacked wheel or a
site-packages folder. The patches are those in `patches/sglang-<version>/`, in name
order; the version is read from the `.dist-info`.

All or nothing: every hunk is placed in memory first, and a file is written only if
all of them fit. There is no fuzz, because a patch is made for one exact release.
Nothing here is needed to serve with TETRIS.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import Distribution
from pathlib import Path

from unidiff import Hunk, PatchedFile, PatchSet


class PatchConflictError(ValueError):
    """A hunk does not fit the file it is for; the message names both."""


def find_patches(wheel_dir: Path, patches_dir: Path | None = None) -> list[Path]:
    """Return the patches for the SGLang that lies in `wheel_dir`, in name order.

    Args:
        wheel_dir: folder with `sglang/` and `sglang-*.dist-info/`.
        patches_dir: folder with `sglang-<version>/`; None = the checkout's own.

    Raises:
        RuntimeError: no SGLang there, or no patches for its version.
    """
    infos = sorted(wheel_dir.glob("sglang-*.dist-info"))
    if len(infos) != 1:
        raise RuntimeError(f"{wheel_dir} holds no unpacked sglang wheel.")
    version = Distribution.at(infos[0]).version
    root = patches_dir or Path(__file__).resolve().parents[3] / "patches"
    found = sorted((root / f"sglang-{version}").glob("*.patch"))
    if not found:
        raise RuntimeError(f"There are no patches for sglang {version} in {root}.")
    return found


def patched_text(text: str, patched: PatchedFile, *, reverse: bool = False) -> str:
    """Return `text` with one file's hunks applied, or taken back.

    Every context and removed line must stand at the place that the hunk names.

    Raises:
        PatchConflictError: one does not.
    """
    # Only "\n" ends a line in a diff; str.splitlines knows a dozen other ends.
    lines = text.split("\n")
    result: list[str] = []
    position = 0
    for hunk in patched:
        old, new, start = _sides(hunk, reverse)
        if start < position or lines[start : start + len(old)] != old:
            raise PatchConflictError(
                f"{patched.path}: the hunk for line {start + 1} does not fit."
            )
        result += lines[position:start] + new
        position = start + len(old)
    return "\n".join(result + lines[position:])


def _sides(hunk: Hunk, reverse: bool) -> tuple[list[str], list[str], int]:
    source = [line.value.rstrip("\n") for line in hunk if not line.is_added]
    target = [line.value.rstrip("\n") for line in hunk if not line.is_removed]
    if reverse:
        return target, source, hunk.target_start - 1
    return source, target, hunk.source_start - 1


def plan(
    wheel_dir: Path, patches: Sequence[Path], *, reverse: bool = False
) -> dict[Path, str]:
    """Return the new text of every file that `patches` change; writes nothing.

    Raises:
        PatchConflictError: a hunk does not fit.
        RuntimeError: a file to patch is missing.
    """
    texts: dict[Path, str] = {}
    for patch in reversed(patches) if reverse else patches:
        for patched in PatchSet.from_filename(str(patch)):
            file = wheel_dir / patched.path
            if file not in texts:
                if not patched.is_modified_file or not file.is_file():
                    raise RuntimeError(f"{patch.name} needs {file}, which is missing.")
                texts[file] = file.read_bytes().decode()
            texts[file] = patched_text(texts[file], patched, reverse=reverse)
    return texts


def state(wheel_dir: Path, patches: Sequence[Path]) -> str:
    """Return "unpatched" or "patched".

    Raises:
        PatchConflictError: it is neither; the message is that of applying.
    """
    try:
        plan(wheel_dir, patches)
        return "unpatched"
    except PatchConflictError as conflict:
        try:
            plan(wheel_dir, patches, reverse=True)
        except PatchConflictError:
            raise conflict from None
    return "patched"


def _write(texts: dict[Path, str]) -> None:
    for file, text in texts.items():
        # A new file, renamed: package managers hard-link files from their cache, and
        # writing in place would patch the cached copy of every other environment.
        fresh = file.with_name(f".{file.name}.patching")
        fresh.write_bytes(text.encode())
        shutil.copymode(file, fresh)
        os.replace(fresh, file)


def apply(wheel_dir: Path, patches: Sequence[Path]) -> int:
    """Apply `patches`; return the number of files written, 0 if already applied."""
    if state(wheel_dir, patches) == "patched":
        return 0
    texts = plan(wheel_dir, patches)
    _write(texts)
    return len(texts)


def revert(wheel_dir: Path, patches: Sequence[Path]) -> int:
    """Take `patches` back; return the number of files written, 0 if not applied."""
    if state(wheel_dir, patches) == "unpatched":
        return 0
    texts = plan(wheel_dir, patches, reverse=True)
    _write(texts)
    return len(texts)


def main(arguments: list[str] | None = None) -> int:
    """Run one action; 0, or 1 after one sentence on standard error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=("apply", "check", "revert"))
    parser.add_argument(
        "--wheel",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder with sglang/ and sglang-*.dist-info/",
    )
    parser.add_argument(
        "--patches",
        type=Path,
        metavar="DIR",
        help="folder with sglang-<version>/; default: patches of this checkout",
    )
    options = parser.parse_args(arguments)
    try:
        patches = find_patches(options.wheel, options.patches)
        if options.action == "check":
            outcome = state(options.wheel, patches)
        else:
            action = apply if options.action == "apply" else revert
            outcome = f"{action(options.wheel, patches)} files changed"
    except (RuntimeError, ValueError, OSError) as error:
        print(f"patch: {error}", file=sys.stderr)
        return 1
    for patch in patches:
        print(f"{patch.parent.name}/{patch.name}: {outcome}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
