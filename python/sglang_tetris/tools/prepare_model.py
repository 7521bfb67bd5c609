"""Make the real model and its two drafts ready on disk, once.

    python -m sglang_tetris.tools.prepare_model [--cache DIR] [--drafts DIR]

A product is built in a scratch folder and renamed into place, so what has its final
name is complete. Each carries a stamp of what it was built from: same stamp, nothing
to do; another one (new draft weights), built again. A lock in the cache serialises
processes. Nothing is installed in the environment.
"""

import argparse
import contextlib
import fcntl
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_tetris.tools.prepare_drafts import (
    EAGLE_NAME,
    HOT_TOKENS_NAME,
    STANDALONE_NAME,
    drafts_fingerprint,
    find_drafts_dir,
    write_eagle,
    write_hot_tokens,
    write_standalone,
)
from sglang_tetris.tools.prepare_gguf import GGUF_SHA256, fetch_gguf
from sglang_tetris.tools.prepare_target import convert_target

CACHE_VARIABLE = "SGLANG_TETRIS_CACHE"
TARGET_NAME = "SmolLM2-135M-Instruct"
STAMP = "prepared.json"
# Raise it when the conversion changes, so that old caches are built again.
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModels:
    """Where the prepared models lie; every path exists."""

    target: Path
    eagle: Path
    standalone: Path
    hot_tokens: Path


def default_cache_dir() -> Path:
    """Return the folder named by SGLANG_TETRIS_CACHE, else ~/.cache/sglang_tetris."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "sglang_tetris"


@contextlib.contextmanager
def _locked(cache_dir: Path, report: Callable[[str], None]) -> Iterator[None]:
    with (cache_dir / ".prepare.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another process that prepares {cache_dir}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_current(folder: Path, source: str) -> bool:
    stamp = folder / STAMP
    if not stamp.is_file():
        return False
    return json.loads(stamp.read_text()) == {"format": FORMAT, "source": source}


def _build(folder: Path, source: str, write: Callable[[Path], None]) -> None:
    """Build `folder` through `write`, atomically; the caller holds the lock."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".build-") as scratch:
        fresh = Path(scratch) / "fresh"
        fresh.mkdir()
        write(fresh)
        stamp = {"format": FORMAT, "source": source}
        (fresh / STAMP).write_text(json.dumps(stamp))
        # A folder cannot be renamed onto a full one: move the old one away first.
        if folder.exists():
            os.replace(folder, Path(scratch) / "old")
        os.replace(fresh, folder)


def prepare(
    cache_dir: Path | None = None,
    drafts_dir: Path | None = None,
    report: Callable[[str], None] = print,
) -> PreparedModels:
    """Return the paths of target, drafts and hot-token map, building what is missing.

    Safe to call from several processes; a second call only reads stamps.

    Args:
        cache_dir: where the models go; None = `default_cache_dir()`.
        drafts_dir: folder with the draft sources; None = the checkout's own.
        report: called with one line before each step that takes time.

    Raises:
        RuntimeError: one sentence that says what failed and, if known, how to mend it.
    """
    cache = cache_dir or default_cache_dir()
    sources = drafts_dir or find_drafts_dir()
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / TARGET_NAME
    hot_tokens = cache / f"{HOT_TOKENS_NAME}.pt"
    with _locked(cache, report):
        if not _is_current(target, GGUF_SHA256):
            report("1/3 downloading and checking the model file (98 MB)")
            gguf = fetch_gguf(cache)
            report("2/3 converting it to bf16 safetensors")
            _build(target, GGUF_SHA256, lambda folder: convert_target(gguf, folder))
        stamp = drafts_fingerprint(sources)
        for name, write in (
            (EAGLE_NAME, write_eagle),
            (STANDALONE_NAME, write_standalone),
        ):
            if not _is_current(cache / name, stamp):
                report(f"3/3 writing the draft {name}")
                _build(cache / name, stamp, lambda f, w=write: w(sources, target, f))
                # Written with every draft: its ids are the drafts' training set.
                write_hot_tokens(sources, hot_tokens.with_suffix(".part"))
                os.replace(hot_tokens.with_suffix(".part"), hot_tokens)
    return PreparedModels(
        target=target,
        eagle=cache / EAGLE_NAME,
        standalone=cache / STANDALONE_NAME,
        hot_tokens=hot_tokens,
    )


def main(arguments: list[str] | None = None) -> int:
    """Prepare and print the paths; 0, or 1 after one sentence on standard error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, help="default: ~/.cache/sglang_tetris")
    parser.add_argument("--drafts", type=Path, help="default: examples/drafts here")
    options = parser.parse_args(arguments)
    try:
        models = prepare(options.cache, options.drafts)
    except (RuntimeError, OSError) as error:
        print(f"prepare_model: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(
            f"prepare_model: {error}; install the serve extra (pip install -e "
            "'.[serve]').",
            file=sys.stderr,
        )
        return 1
    for name in PreparedModels.__slots__:
        print(f"{name}: {getattr(models, name)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
