"""The serving arms that demo and benchmark compare: one set of server flags each.

All arms share the model, the data type and the pool; the speculative ones share the
draft and, but for one, its hot-token map. A shape is (num_steps, topk,
num_draft_tokens), the last with the anchor, as SGLang counts it.
"""

from dataclasses import dataclass

from sglang_tetris.tools.prepare_model import PreparedModels

DRAFTS = ("eagle", "standalone")
PLAIN = "plain"
CHAIN = "eagle-chain"
TREE = "eagle-tree"
TETRIS = "tetris"
# TETRIS that weighs for itself whether to draft, how deep, and how much to verify.
TETRIS_AUTO = "tetris-auto"
# TETRIS whose draft scores the whole vocabulary: what the hot-token map buys.
TETRIS_ALL_TOKENS = "tetris-all-tokens"
ARM_NAMES = (PLAIN, CHAIN, TREE, TETRIS, TETRIS_ALL_TOKENS, TETRIS_AUTO)
# What TETRIS costs where drafts are worth nothing: told so, and finding out.
TETRIS_UNDRAFTED = "tetris-undrafted"
TETRIS_SCRAMBLED = "tetris-scrambled"
# TETRIS runs without overlap scheduling: what that alone costs.
PLAIN_SYNCHRONOUS = "plain-synchronous"
COST_ARM_NAMES = (PLAIN_SYNCHRONOUS, TETRIS_UNDRAFTED, TETRIS_SCRAMBLED)

# 20,000 tokens of this model are 0.5 GB; more would only delay the start. The fraction
# is a bound above that: SGLang refuses to start if memory that other programs take
# while the weights load leaves less than it.
COMMON_FLAGS = ("--max-total-tokens", "20000", "--mem-fraction-static", "0.6")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How far and how wide to draft; num_draft_tokens counts the anchor."""

    num_steps: int
    topk: int
    num_draft_tokens: int

    def flags(self) -> tuple[str, ...]:
        """Return SGLang's three flags for this shape."""
        return (
            *("--speculative-num-steps", str(self.num_steps)),
            *("--speculative-eagle-topk", str(self.topk)),
            *("--speculative-num-draft-tokens", str(self.num_draft_tokens)),
        )


CHAIN_SHAPE = Shape(num_steps=2, topk=1, num_draft_tokens=3)
TREE_SHAPE = Shape(num_steps=3, topk=2, num_draft_tokens=6)
# Shallow: a CPU pays for every draft step, and few deep drafts are worth a row.
TETRIS_SHAPE = Shape(num_steps=2, topk=2, num_draft_tokens=5)
# Rows for the whole step, not per request: what a step affords beyond the requests' own
# rows does not grow with their number on a machine that is short of arithmetic.
TETRIS_BUDGET = "8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One thing to measure: a short name, a label for tables, and its server flags."""

    name: str
    label: str
    flags: tuple[str, ...]


def make_arm(
    name: str,
    models: PreparedModels,
    *,
    dtype: str = "bfloat16",
    draft: str = "eagle",
    tetris_shape: Shape = TETRIS_SHAPE,
    tetris_budget: str = TETRIS_BUDGET,
) -> Arm:
    """Return the arm called `name` with every flag that `launch_server` needs.

    Args:
        name: one of `ARM_NAMES` or `COST_ARM_NAMES`.
        models: where target, drafts and hot-token map lie.
        dtype: always given, because SGLang turns a float32 model into float16.
        draft: one of `DRAFTS`; the fixed shapes use the same one.
        tetris_shape, tetris_budget: for the TETRIS arms only, where the arm's name does
            not say the budget.

    Raises:
        ValueError: an unknown name or draft.
    """
    names = (*ARM_NAMES, *COST_ARM_NAMES)
    if name not in names:
        raise ValueError(f"arm must be one of {', '.join(names)}, got {name!r}")
    if draft not in DRAFTS:
        raise ValueError(f"draft must be one of {', '.join(DRAFTS)}, got {draft!r}")
    flags = ("--model-path", str(models.target), "--dtype", dtype, *COMMON_FLAGS)
    if name == PLAIN:
        return Arm(name=name, label="no speculation", flags=flags)
    if name == PLAIN_SYNCHRONOUS:
        label = "no speculation, no overlap"
        return Arm(name=name, label=label, flags=(*flags, "--disable-overlap-schedule"))
    path = models.eagle if draft == "eagle" else models.standalone
    if name == TETRIS_SCRAMBLED:
        # Imports torch, which no other arm needs.
        from sglang_tetris.tools.scrambled_draft import scrambled_copy

        path = scrambled_copy(path)
    flags += ("--speculative-draft-model-path", str(path))
    if name != TETRIS_ALL_TOKENS:
        flags += ("--speculative-token-map", str(models.hot_tokens))
    stock = "EAGLE" if draft == "eagle" else "STANDALONE"
    if name == CHAIN:
        label = f"SGLang {stock}, chain of {CHAIN_SHAPE.num_steps}"
        shape, algorithm = CHAIN_SHAPE, stock
    elif name == TREE:
        label = f"SGLang {stock}, tree of {TREE_SHAPE.num_draft_tokens}"
        shape, algorithm = TREE_SHAPE, stock
    else:
        budgets = {TETRIS_AUTO: "auto", TETRIS_SCRAMBLED: "auto", TETRIS_UNDRAFTED: "0"}
        tetris_budget = budgets.get(name, tetris_budget)
        label = f"TETRIS, budget {tetris_budget}"
        label += ", all tokens" if name == TETRIS_ALL_TOKENS else ""
        label += ", scrambled draft" if name == TETRIS_SCRAMBLED else ""
        shape, algorithm = tetris_shape, "TETRIS"
        flags += ("--tetris-budget", tetris_budget)
    flags += ("--speculative-algorithm", algorithm, *shape.flags())
    return Arm(name=name, label=label, flags=flags)
