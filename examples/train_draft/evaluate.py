"""Measure the exported drafts on held-out prompts, by depth and by kind of prompt.

    python examples/train_draft/evaluate.py

The held-out answers are the target's greedy ones, so a draft token is accepted when
it equals the answer's. Two ways to count, of the exported bf16 weights in float32:
    every place: drafting starts at each place of the answer; depth d's figure is
        P(token d right | tokens 1 to d - 1 right);
    rounds: drafting starts where a server's round would, one token after what the
        round before had accepted; this is what a server's counters show.
Each with the draft's arg-max over the whole vocabulary and over the hot tokens; the
standalone draft over the hot tokens also unshifted, as TETRIS runs it.
"""

import argparse
import hashlib
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from data import Sequence, answer_tokens, load_sequences, make_batch
from draft_models import EagleDraft, StandaloneDraft
from export import FOLDERS
from llama_layers import load_target
from prompts import KINDS
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from sglang_tetris.tools.prepare_drafts import HOT_TOKENS_NAME
from sglang_tetris.tools.prepare_model import TARGET_NAME, default_cache_dir


def load_draft(kind: str, folder: Path, config: Any, embedding: Tensor) -> nn.Module:
    """Return an exported draft in float32."""
    weights = load_file(folder / "model.safetensors")
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    draft: nn.Module = EagleDraft(config, embedding)
    if kind == "standalone":
        draft = StandaloneDraft(config, embedding, layers)
    draft.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return draft


class Unshifted(nn.Module):
    """A standalone draft that sees token i at position i, the very first one too."""

    def __init__(self, draft: nn.Module) -> None:
        super().__init__()
        self.draft = draft

    def forward(self, ids: Tensor, hidden: Tensor, depth: int) -> list[Tensor]:
        # The draft drops the first of its tokens; it then drops a copy.
        ids = torch.cat([ids[:, :1], ids], 1)
        return [feature[:, 1:] for feature in self.draft(ids, hidden, depth)]


def right_tokens(
    draft: nn.Module, sequence: Sequence, guess: Callable[[Tensor], Tensor], depth: int
) -> Tensor:
    """Return bool `[places, depth]`: drafting from place p, is token d + 1 right,
    given that those before it were? Only places with `depth` tokens left."""
    batch = make_batch([sequence])
    with torch.inference_mode():
        features = draft(batch.ids, batch.hidden, depth)
        answers = batch.ids[0, 2:]
        right = torch.stack([guess(f[0, :-1]) == answers for f in features])
    first, last = int(batch.first[0]), int(batch.last[0])
    places = torch.arange(first, last - depth + 1)
    return torch.stack([right[d, places + d] for d in range(depth)], dim=-1)


def count_rounds(right: Tensor) -> Tensor:
    """Return the rows of `right` at which a server's rounds start."""
    place, starts = 0, []
    while place < len(right):
        starts.append(place)
        place += 1 + int(right[place].long().cumprod(0).sum())
    return right[starts]


def summarise(rights: list[Tensor]) -> dict[str, Any]:
    """Return acceptance per depth and the tokens of a round, bonus included."""
    right = torch.cat(rights).double()
    reached = right.cumprod(-1).sum(0)
    before = torch.cat([torch.tensor([float(len(right))]), reached[:-1].float()])
    rates = [round(float(a / b), 4) for a, b in zip(reached, before, strict=True)]
    length = 1 + float(reached.sum()) / len(right)
    return {"per_depth": rates, "accept_length": round(length, 3), "n": len(right)}


def evaluate(
    draft: nn.Module,
    sequences: list[Sequence],
    guess: Callable[[Tensor], Tensor],
    depth: int,
) -> dict[str, Any]:
    """Return both counts, of all kinds and of each."""
    rights = [right_tokens(draft, s, guess, depth) for s in sequences]
    report: dict[str, Any] = {}
    for kind in ("all", *KINDS):
        mine = [
            r
            for r, s in zip(rights, sequences, strict=True)
            if kind in ("all", s.kind) and len(r)
        ]
        report[kind] = {
            "every_place": summarise(mine),
            "rounds": summarise([count_rounds(r) for r in mine]),
        }
    return report


def main() -> None:
    """Print a table and write evaluation.json."""
    here = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--data", type=Path, default=Path("build/draft_data"))
    parser.add_argument(
        "--target", type=Path, default=default_cache_dir() / TARGET_NAME
    )
    parser.add_argument("--drafts", type=Path, default=here / "drafts")
    parser.add_argument("--only", choices=tuple(FOLDERS), help="print, write nothing")
    options = parser.parse_args()
    config, weights = load_target(options.target)
    embedding = weights["model.embed_tokens.weight"]
    hot = torch.tensor(
        json.loads((options.drafts / f"{HOT_TOKENS_NAME}.json").read_text())
    )
    hot_head = embedding[hot].contiguous()
    guesses = {
        "full": lambda f: functional.linear(f, embedding).argmax(-1),
        "hot": lambda f: hot[functional.linear(f, hot_head).argmax(-1)],
    }
    sequences = load_sequences(options.data / "held-out")
    report: dict[str, Any] = {"drafts": {}}
    print(f"{'draft':11}{'vocabulary':11}{'kind':7}{'acceptance':>18}{'rounds':>20}")
    for kind in FOLDERS:
        if options.only not in (None, kind):
            continue
        file = options.drafts / FOLDERS[kind] / "model.safetensors"
        draft = load_draft(kind, file.parent, config, embedding)
        results = {
            name: evaluate(draft, sequences, guess, options.depth)
            for name, guess in guesses.items()
        }
        if kind == "standalone":
            results["unshifted"] = evaluate(
                Unshifted(draft), sequences, guesses["hot"], options.depth
            )
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        report["drafts"][kind] = {"weights_sha256": digest, **results}
        for name, by_kind in results.items():
            for prompts, figures in by_kind.items():
                cells = "".join(
                    "  " + " ".join(f"{r:.3f}" for r in figures[way]["per_depth"])
                    for way in ("every_place", "rounds")
                )
                length = figures["rounds"]["accept_length"]
                print(f"{kind:11}{name:11}{prompts:7}{cells}  length {length:.2f}")
    answers = torch.cat([s.ids[s.prompt_tokens :] for s in sequences])
    report["hot_token_coverage"] = round(
        float(torch.isin(answers, hot).mean(dtype=float)), 4
    )
    report["provenance"] = {
        "command": "python examples/train_draft/evaluate.py",
        "held_out_prompts": len(sequences),
        "answer_tokens": answer_tokens(sequences),
        "chain_depth": options.depth,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, float32",
    }
    if options.only is None:
        text = json.dumps(report, indent=1)
        (options.drafts / "evaluation.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
