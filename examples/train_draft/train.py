"""Train one draft on the generated data and export it.

    python examples/train_draft/train.py --draft eagle --minutes 25
    python examples/train_draft/train.py --draft standalone --minutes 25

Loss, over the rows that predict an answer token, summed over drafting steps d:
    KL(target's softmax || draft's softmax), both over the hot tokens only,
    + FEATURE_WEIGHT * smooth-L1(draft's feature, target's next feature).
The target's softmax is computed on the fly from the stored features. The learning
rate falls along a cosine over the given minutes of training time, so a slower
machine does fewer steps but still ends at zero. A checkpoint is written every minute;
started again, training goes on from it. At the end the weights go to --drafts as bf16.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from data import (
    Batch,
    Sequence,
    answer_tokens,
    choose_hot_tokens,
    load_sequences,
    shuffled_batches,
)
from draft_models import EagleDraft, StandaloneDraft, init_eagle, init_standalone
from export import export_draft, save_hot_tokens
from llama_layers import load_target
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from sglang_tetris.tools.prepare_model import TARGET_NAME, default_cache_dir

STEP_WEIGHTS = (1.0, 0.8, 0.6)
FEATURE_WEIGHT = 0.5
# Until this share of the time only the first drafting step is trained: it costs half,
# and the later steps start from what it has learnt.
DEPTH_FROM = 0.3
CHECKPOINT_S = 60.0
# Enough rows for the regressions that give the first weights.
INIT_SEQUENCES = 300


def batch_loss(draft: nn.Module, batch: Batch, head: Tensor, depth: int) -> Tensor:
    """Return the mean loss per predicting row; `head` holds the hot rows."""
    start = int(batch.first.min())
    features = draft(batch.ids, batch.hidden, depth, start)
    truth = functional.pad(batch.hidden[:, start + 1 :], (0, 0, 0, 1))
    rows = torch.arange(start, batch.hidden.shape[1])
    first = batch.first[:, None]
    inside = (rows >= first) & (rows < batch.last[:, None])
    with torch.no_grad():
        target_shares = functional.linear(truth[inside], head).softmax(-1)
    row_of = torch.zeros_like(inside, dtype=torch.int64)
    row_of[inside] = torch.arange(int(inside.sum()))
    total = torch.zeros(())
    for step, feature in enumerate(features):
        # Step d starts from a true feature of the answer or the prompt's last one.
        valid = inside & (rows >= first + step)
        chosen = feature[valid]
        scores = functional.linear(chosen, head).log_softmax(-1)
        shares = target_shares if step == 0 else target_shares[row_of[valid]]
        kl = -(shares * scores).sum(-1).mean()
        near = functional.smooth_l1_loss(chosen, truth[valid])
        total = total + STEP_WEIGHTS[step] * (kl + FEATURE_WEIGHT * near)
    return total


def build(
    kind: str, target: Path, sequences: list[Sequence], layers: list[int]
) -> tuple[nn.Module, Tensor]:
    """Return a freshly initialised draft and the target's embedding."""
    config, weights = load_target(target)
    embedding = weights["model.embed_tokens.weight"]
    sample = sequences[:INIT_SEQUENCES]
    ids, features = [s.ids for s in sample], [s.hidden for s in sample]
    if kind == "eagle":
        draft: nn.Module = EagleDraft(config, embedding)
        init_eagle(draft, ids, features)
    else:
        draft = StandaloneDraft(config, embedding, len(layers))
        init_standalone(draft, weights, tuple(layers), ids, features)
    return draft, embedding


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically."""
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def run(options: argparse.Namespace) -> None:
    """Train until the minutes are used up, then export."""
    sequences = load_sequences(options.data / "train")
    hot = choose_hot_tokens(sequences)
    draft, embedding = build(
        options.draft, options.target, sequences, options.init_layers
    )
    head = embedding[hot].contiguous()
    optimizer = torch.optim.AdamW(
        draft.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    progress = {"seconds": 0.0, "step": 0, "epoch": 0, "loss": math.nan}
    checkpoint = options.data / f"{options.name or options.draft}.ckpt"
    if checkpoint.exists():
        state = torch.load(checkpoint)
        draft.load_state_dict(state["draft"])
        optimizer.load_state_dict(state["optimizer"])
        progress = state["progress"]
    elif options.start_from:
        draft.load_state_dict(torch.load(options.start_from)["draft"])
    budget_s = 60 * options.minutes
    saved = time.time()
    bar = tqdm(total=round(budget_s), unit="s", desc=options.draft)
    bar.update(round(progress["seconds"]))
    while progress["seconds"] < budget_s:
        for batch in shuffled_batches(
            sequences, batch_tokens=options.batch_tokens, seed=progress["epoch"]
        ):
            started = time.time()
            done = progress["seconds"] / budget_s
            warm = min(1.0, (progress["step"] + 1) / 20)
            rate = options.rate * warm * 0.5 * (1 + math.cos(math.pi * min(done, 1)))
            for group in optimizer.param_groups:
                group["lr"] = rate
            depth = options.depth if done >= DEPTH_FROM else 1
            loss = batch_loss(draft, batch, head, depth)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimizer.step()
            old = progress["loss"]
            value = float(loss.detach())
            progress["loss"] = value if math.isnan(old) else 0.95 * old + 0.05 * value
            progress["step"] += 1
            progress["seconds"] += time.time() - started
            bar.update(round(progress["seconds"]) - bar.n)
            bar.set_postfix(loss=f"{progress['loss']:.3f}", step=progress["step"])
            if time.time() - saved > CHECKPOINT_S:
                state = {"draft": draft.state_dict(), "progress": progress}
                save(checkpoint, {**state, "optimizer": optimizer.state_dict()})
                saved = time.time()
            if progress["seconds"] >= budget_s:
                break
        else:
            progress["epoch"] += 1
    state = {"draft": draft.state_dict(), "progress": progress}
    save(checkpoint, {**state, "optimizer": optimizer.state_dict()})
    facts = {**progress, "answer_tokens": answer_tokens(sequences)}
    print(json.dumps(facts))
    export_draft(options.draft, draft.state_dict(), options.target, options.drafts)
    save_hot_tokens(hot, options.drafts)


def main() -> None:
    """Parse the command line and train."""
    here = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", choices=("eagle", "standalone"), required=True)
    parser.add_argument("--minutes", type=float, default=25, help="training time")
    parser.add_argument("--depth", type=int, default=None, help="steps trained")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--init-layers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--start-from", type=Path, help="a checkpoint's weights")
    parser.add_argument("--name", help="of the checkpoint; default: the draft's kind")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data", type=Path, default=Path("build/draft_data"))
    parser.add_argument(
        "--target", type=Path, default=default_cache_dir() / TARGET_NAME
    )
    parser.add_argument("--drafts", type=Path, default=here / "drafts")
    options = parser.parse_args()
    options.depth = options.depth or (2 if options.draft == "eagle" else 1)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    run(options)


if __name__ == "__main__":
    main()
