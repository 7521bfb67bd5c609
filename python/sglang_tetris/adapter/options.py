"""The user's TETRIS settings: command line, `configure`, and the spawned processes.

SGLang's own record has no room for an extension's flags, so they travel in one
environment variable, written by the process that parses the command line (or calls
`configure`) and read by every process SGLang spawns. It also carries the draft kind
once that is known, because SGLang asks the algorithm for it in every process.
"""

import argparse
import dataclasses
import json
import os
from pathlib import Path

from sglang_tetris.core.config import TetrisConfig
from sglang_tetris.core.errors import TetrisConfigError

OPTIONS_ENV = "SGLANG_TETRIS_OPTIONS"
DRAFT_KINDS = ("eagle", "eagle3", "standalone")
FLAGS = {
    "tetris_budget": (
        "auto",
        "Draft tokens verified per step over the whole batch: N, kx (k per request), "
        "or auto (whether to draft, how deep and how many follow the measured cost).",
    ),
    "tetris_verify": (
        "match",
        "match: the target's own token decides; rejection: sampled chains are accepted "
        "by probability.",
    ),
    "tetris_draft": (
        "auto",
        "auto | eagle | eagle3 | standalone | none; auto reads the draft's config.",
    ),
    "tetris_cost_table": (
        None,
        "Path of a cost table that auto starts from (tools.profile_cost writes one).",
    ),
    "tetris_trace": (None, "Path of a trace of every round to write, JSON lines."),
    "tetris_config": (None, "JSON object, or path of one, with the other settings."),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TetrisOptions:
    """What the user asked for, and the draft kind that was found.

    draft_kind is None until the draft's configuration has been read.
    """

    tetris_budget: str = "auto"
    tetris_verify: str = "match"
    tetris_draft: str = "auto"
    tetris_cost_table: str | None = None
    tetris_trace: str | None = None
    tetris_config: str | None = None
    draft_kind: str | None = None

    def parsed(self) -> TetrisConfig:
        """Return the validated values; ValueError names the flag and what it holds."""
        return TetrisConfig.parse(
            budget=self.tetris_budget,
            verify=self.tetris_verify,
            draft=self.tetris_draft,
            cost_table=self.tetris_cost_table,
            trace=self.tetris_trace,
            config=_config_text(self.tetris_config),
        )


def _config_text(value: str | None) -> str | None:
    """Return the JSON text of `--tetris-config`, which may be the path of a file."""
    if value is None or value.lstrip().startswith("{"):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TetrisConfigError(
            f"--tetris-config must be a JSON object or a readable file: {error}"
        ) from error


def configure(**settings: str | int | None) -> None:
    """Set the TETRIS options of the `sglang.Engine`s started next in this process.

    Takes the command line's keys: `tetris_budget`, `tetris_verify`, `tetris_draft`,
    `tetris_cost_table`, `tetris_trace`, `tetris_config`. What is not named goes back
    to its default. Raises ValueError for an unknown key or a value that is not valid.
    """
    unknown = sorted(set(settings) - set(FLAGS))
    if unknown:
        raise ValueError(
            f"configure() does not know {unknown[0]!r}; it takes {', '.join(FLAGS)}"
        )
    values = {
        key: json.dumps(value) if isinstance(value, dict) else str(value)
        for key, value in settings.items()
        if value is not None
    }
    options = TetrisOptions(**values)
    options.parsed()
    publish(options)


def publish(options: TetrisOptions) -> None:
    """Make `options` those of this process and of the processes it spawns."""
    os.environ[OPTIONS_ENV] = json.dumps(dataclasses.asdict(options))


def current() -> TetrisOptions:
    """Return the options that were published here or by the parent process."""
    stored = os.environ.get(OPTIONS_ENV)
    return TetrisOptions(**json.loads(stored)) if stored else TetrisOptions()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the TETRIS flags to SGLang's command line."""
    group = parser.add_argument_group("TETRIS")
    for key, (default, text) in FLAGS.items():
        flag = "--" + key.replace("_", "-")
        group.add_argument(flag, type=str, default=default, help=text)


def publish_parsed_args(args: argparse.Namespace) -> None:
    """Publish the options found on a parsed command line."""
    publish(TetrisOptions(**{key: getattr(args, key) for key in FLAGS}))
