"""Generated sequences, hot tokens and batches."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

NUM_HOT_TOKENS = 8192
# A token seen this often in the target's answers is hot; the rest of the map is
# filled with the lowest ids, which a BPE vocabulary lists by frequency of its corpus.
MIN_COUNT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """`ids` [n] int32; `hidden` [n - 1, hidden] float16, after the final norm."""

    ids: Tensor
    hidden: Tensor
    prompt_tokens: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Right-padded: `ids` [b, t + 1], `hidden` [b, t, h]; `first`, `last` [b] bound
    the rows that predict an answer token: first <= row < last."""

    ids: Tensor
    hidden: Tensor
    first: Tensor
    last: Tensor


def load_sequences(folder: Path) -> list[Sequence]:
    """Return all sequences of a split, in the order of their prompts."""
    records = [r for path in sorted(folder.glob("*.pt")) for r in torch.load(path)]
    if not records:
        raise RuntimeError(f"No shards in {folder}: run generate.py first.")
    records.sort(key=lambda record: record["index"])
    names = ("ids", "hidden", "prompt_tokens", "kind")
    return [Sequence(**{name: r[name] for name in names}) for r in records]


def answer_tokens(sequences: list[Sequence]) -> int:
    """Return how many tokens the target generated."""
    return sum(len(s.ids) - s.prompt_tokens for s in sequences)


def choose_hot_tokens(sequences: list[Sequence]) -> list[int]:
    """Return NUM_HOT_TOKENS ids in ascending order."""
    counts: Counter[int] = Counter()
    for sequence in sequences:
        counts.update(sequence.ids[sequence.prompt_tokens :].tolist())
    hot = [i for i, n in counts.most_common(NUM_HOT_TOKENS) if n >= MIN_COUNT]
    chosen = set(hot)
    for index in range(2 * NUM_HOT_TOKENS):
        if len(chosen) == NUM_HOT_TOKENS:
            break
        chosen.add(index)
    return sorted(chosen)


def make_batch(sequences: list[Sequence]) -> Batch:
    """Pad to the longest."""
    longest = max(len(s.hidden) for s in sequences)
    size = sequences[0].hidden.shape[1]
    ids = torch.zeros(len(sequences), longest + 1, dtype=torch.int64)
    hidden = torch.zeros(len(sequences), longest, size)
    for row, s in enumerate(sequences):
        ids[row, : len(s.ids)] = s.ids
        hidden[row, : len(s.hidden)] = s.hidden.float()
    # Row j predicts token j + 2, and the true feature j + 1 gives its target.
    first = torch.tensor([s.prompt_tokens - 1 for s in sequences])
    last = torch.tensor([len(s.hidden) - 1 for s in sequences])
    return Batch(ids=ids, hidden=hidden, first=first, last=last)


def shuffled_batches(
    sequences: list[Sequence], *, batch_tokens: int, seed: int
) -> Iterator[Batch]:
    """Yield one epoch: similar sequences together, batches in any order.

    Chats and raw texts do not mix: a raw text's prompt is short, and the rows before
    the shortest prompt of a batch cost least.
    """
    rng = random.Random(seed)
    ordered = sorted(
        sequences,
        key=lambda s: (s.prompt_tokens < 24, len(s.ids) * rng.uniform(0.9, 1.1)),
    )
    groups: list[list[Sequence]] = [[]]
    for s in ordered:
        if groups[-1] and (len(groups[-1]) + 1) * len(s.ids) > batch_tokens:
            groups.append([])
        groups[-1].append(s)
    rng.shuffle(groups)
    for group in groups:
        yield make_batch(group)
