"""The records that pass between the steps of a round.

Shapes and dtypes are checked on construction. Values are checked there only where
reading them cannot wait for a device, that is on a CPU; `validate()` checks them
anywhere. bs is the number of requests, max_nodes the draft nodes a row has room for.
"""

import copy
from dataclasses import dataclass

import torch

from sglang_tetris.core.errors import check_count, check_tensor, on_plain_cpu

# Two signed integer dtypes are in use for lengths and tokens at SGLang's interfaces.
INDEX_DTYPES = (torch.int64, torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftTrees:
    """One draft tree per request, each rooted at the request's anchor.

    The anchor is not a node. Siblings hold different tokens as a rule, but need not.
    A chain is the tree whose parents are -1, 0, 1, ...

    tokens        [bs, max_nodes] int64
    parents       [bs, max_nodes] int64, the parent's index in the row, below the node's
                  own index; -1 = child of the anchor
    accept_probs  [bs, max_nodes] float32 in [0, 1], P(node accepted | path accepted)
    num_nodes     [bs] int64; nodes from there on are padding, whose values are ignored
    max_depth     bound on the depth of any node that the host knows (SGLang's
                  num_steps), or None; an accelerator then needs fewer launches and
                  `match_tree` fewer columns. Depth 1 = child of the anchor.

    Raises ValueError for a wrong shape, dtype, device or (on a CPU) value.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    accept_probs: torch.Tensor
    num_nodes: torch.Tensor
    max_depth: int | None = None

    def __post_init__(self) -> None:
        layout = "[bs, max_nodes]"
        check_tensor("tokens", self.tokens, layout, (-1, -1), torch.int64)
        shape, device = self.tokens.shape, self.tokens.device
        probs = self.accept_probs
        check_tensor("parents", self.parents, layout, shape, torch.int64, device)
        check_tensor("accept_probs", probs, layout, shape, torch.float32, device)
        check_tensor(
            "num_nodes", self.num_nodes, "[bs]", shape[:1], torch.int64, device
        )
        if self.max_depth is not None:
            check_count("max_depth", self.max_depth)
        if on_plain_cpu(self.tokens):
            self.validate()

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def max_nodes(self) -> int:
        return self.tokens.shape[1]

    def is_node(self) -> torch.Tensor:
        """Return `[bs, max_nodes]` bool, False at padding."""
        places = torch.arange(self.max_nodes, device=self.tokens.device)
        return places < self.num_nodes[:, None]

    def with_accept_probs(self, accept_probs: torch.Tensor) -> "DraftTrees":
        """Return these trees with other probabilities, whose values are not checked.

        Checking them again, as the constructor does, takes longer than most steps of a
        round. Raises ValueError for a wrong shape, dtype or device.
        """
        layout, device = "[bs, max_nodes]", self.tokens.device
        shape = self.tokens.shape
        check_tensor("accept_probs", accept_probs, layout, shape, torch.float32, device)
        trees = copy.copy(self)
        object.__setattr__(trees, "accept_probs", accept_probs)
        return trees

    def validate(self) -> None:
        """Check the values; on an accelerator this waits for the device.

        `max_depth` is checked where it is used, by `build_verify_plan` on a CPU.
        """
        outside = (self.num_nodes < 0) | (self.num_nodes > self.max_nodes)
        if outside.any():
            _refuse("num_nodes", self.num_nodes, outside, f"in [0, {self.max_nodes}]")
        node = self.is_node()
        own_index = torch.arange(self.max_nodes, device=self.tokens.device)
        misplaced = node & ((self.parents < -1) | (self.parents >= own_index))
        if misplaced.any():
            wanted = "-1 or the index of an earlier node"
            _refuse("parents", self.parents, misplaced, wanted)
        probs = self.accept_probs
        # Written so that NaN, which compares false with everything, is caught.
        improbable = node & ~((probs >= 0) & (probs <= 1))
        if improbable.any():
            _refuse("accept_probs", probs, improbable, "in [0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Allocation:
    """Which draft nodes the target is to verify in this step.

    keep                    [bs, max_nodes] bool, closed under parents
    verify_lens             [bs] int32, kept nodes + 1 for the anchor
    expected_correct_drafts [bs] float32, sum of the kept nodes' survival
    """

    keep: torch.Tensor
    verify_lens: torch.Tensor
    expected_correct_drafts: torch.Tensor

    def __post_init__(self) -> None:
        check_tensor("keep", self.keep, "[bs, max_nodes]", (-1, -1), torch.bool)
        rows, device = self.keep.shape[:1], self.keep.device
        expected = self.expected_correct_drafts
        check_tensor("verify_lens", self.verify_lens, "[bs]", rows, torch.int32, device)
        check_tensor(
            "expected_correct_drafts", expected, "[bs]", rows, torch.float32, device
        )

    def validate(self) -> None:
        """Check that lengths and kept nodes agree; waits for an accelerator."""
        differs = self.verify_lens != self.keep.sum(1) + 1
        if differs.any():
            _refuse("verify_lens", self.verify_lens, differs, "1 + the nodes kept")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyPlan:
    """The ragged batch of rows that the target verifies, and the trees over it.

    T rows, request after request: the anchor, then the kept nodes in ascending order.
    A row's place is its number within its request; the anchor's place is 0. W is the
    width of the dense tables, M the length of the flat mask.

    input_ids              [T] int64
    positions              [T] int64, prefix_lens + depth, the anchor's depth being 0
    qo_indptr              [bs + 1] int32, request r owns rows qo_indptr[r] to [r + 1]
    node_ids               [T] int64, the node's index in its tree's row, -1 = anchor
    retrieve_index         [bs, W] int64, the flat row at a place
    retrieve_next_token    [bs, W] int64, place of the first child
    retrieve_next_sibling  [bs, W] int64, place of the next child of the same parent
    retrieve_parent        [bs, W] int64, place of the parent
    tree_mask              [M] bool, per request a row-major [verify_len, verify_len]
                           block, True = attend (to ancestors and oneself)
    prefix_lens            [bs] int64, tokens in the KV cache ahead of the anchor
    max_depth              depth of the deepest node, or a bound the host knew

    Tables hold -1 where there is none. Without padding T = sum(verify_lens), W =
    max(verify_lens) and M = sum(verify_lens ** 2). Padded rows belong to no request and
    hold input_ids 0, positions 0, node_ids -1; padding of a mask is False. The names
    and meanings of the retrieve tables are those of SGLang's EAGLE verify input.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    qo_indptr: torch.Tensor
    node_ids: torch.Tensor
    retrieve_index: torch.Tensor
    retrieve_next_token: torch.Tensor
    retrieve_next_sibling: torch.Tensor
    retrieve_parent: torch.Tensor
    tree_mask: torch.Tensor
    prefix_lens: torch.Tensor
    max_depth: int

    def __post_init__(self) -> None:
        rows, device = self.input_ids.shape, self.input_ids.device
        table = self.retrieve_index.shape
        wanted = (
            ("input_ids", "[T]", (-1,), torch.int64),
            ("positions", "[T]", rows, torch.int64),
            ("node_ids", "[T]", rows, torch.int64),
            ("retrieve_index", "[bs, W]", (-1, -1), torch.int64),
            ("retrieve_next_token", "[bs, W]", table, torch.int64),
            ("retrieve_next_sibling", "[bs, W]", table, torch.int64),
            ("retrieve_parent", "[bs, W]", table, torch.int64),
            ("qo_indptr", "[bs + 1]", (table[0] + 1,), torch.int32),
            ("prefix_lens", "[bs]", table[:1], torch.int64),
            ("tree_mask", "[M]", (-1,), torch.bool),
        )
        for name, layout, shape, dtype in wanted:
            check_tensor(name, getattr(self, name), layout, shape, dtype, device)
        check_count("max_depth", self.max_depth)

    @property
    def batch_size(self) -> int:
        return self.retrieve_index.shape[0]

    @property
    def verify_lens(self) -> torch.Tensor:
        """`[bs]` int32, rows per request, anchor included."""
        return self.qo_indptr.diff()

    def custom_mask(self, *, num_elements: int | None = None) -> torch.Tensor:
        """Return the mask over prefix and tree, in FlashInfer's flat layout.

        Per request a row-major [verify_len, prefix_len + verify_len] block: True over
        the prefix, then the request's block of `tree_mask`. Flat bool of exact length
        sum(verify_lens * (prefix_lens + verify_lens)), which waits once for an
        accelerator; with `num_elements`, a bound known to the host, padded to it with
        False and no wait.
        """
        lens = self.verify_lens.to(torch.int64)
        ends = (lens * (self.prefix_lens + lens)).cumsum(0)
        if num_elements is None:
            num_elements = _total_host(ends)
        check_count("num_elements", num_elements)
        device = self.input_ids.device
        if self.batch_size == 0:
            return torch.zeros(num_elements, dtype=torch.bool, device=device)
        mask = torch.arange(num_elements + 1, device=device) < ends[-1]
        # Only the tree's part differs from all True, so move just that into place.
        # Elements of no request, or past a bound set too low, go to a spare last slot.
        tree_ends = (lens * lens).cumsum(0)
        element = torch.arange(self.tree_mask.shape[0], device=device)
        request = torch.searchsorted(tree_ends, element, right=True)
        live = request < self.batch_size
        request = request.clamp(max=self.batch_size - 1)
        side = lens[request]
        element = element - (tree_ends - lens * lens)[request]
        row, column = element // side, element % side
        begin = (ends - lens * (self.prefix_lens + lens))[request]
        stride = self.prefix_lens[request] + side
        target = begin + row * stride + self.prefix_lens[request] + column
        target = torch.where(live, target, num_elements).clamp(max=num_elements)
        return mask.scatter_(0, target, self.tree_mask)[:num_elements]

    def validate(self) -> None:
        """Check that the row ranges and sizes agree; waits for an accelerator."""
        bad_start = self.qo_indptr[:1] != 0
        if bad_start.any():
            _refuse("qo_indptr", self.qo_indptr[:1], bad_start, "0 at the start")
        empty = self.verify_lens < 1
        if empty.any():
            _refuse("verify_lens", self.verify_lens, empty, "at least 1")
        sizes = (
            ("qo_indptr", self.qo_indptr[-1:], self.input_ids),
            ("tree_mask", (self.verify_lens.long() ** 2).sum()[None], self.tree_mask),
        )
        for name, needed, holder in sizes:
            short = needed > holder.shape[0]
            if short.any():
                _refuse(name, needed, short, f"at most {holder.shape[0]} elements")
        negative = self.prefix_lens < 0
        if negative.any():
            _refuse("prefix_lens", self.prefix_lens, negative, "at least 0")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AcceptResult:
    """What a round commits, D being the plan's `max_depth`.

    accept_index   [bs, D + 1] int32, flat rows of the followed path, the anchor first;
                   -1 beyond its end
    accept_lens    [bs] int32, rows on the path = tokens to emit, bonus token included
    accept_tokens  [bs, D + 1] int64, the target's token at each of these rows: first
                   the correct drafts, then the bonus token; -1 beyond
    """

    accept_index: torch.Tensor
    accept_lens: torch.Tensor
    accept_tokens: torch.Tensor

    def __post_init__(self) -> None:
        index, tokens, layout = self.accept_index, self.accept_tokens, "[bs, D + 1]"
        check_tensor("accept_index", index, layout, (-1, -1), torch.int32)
        shape, device = index.shape, index.device
        check_tensor("accept_tokens", tokens, layout, shape, torch.int64, device)
        check_tensor(
            "accept_lens", self.accept_lens, "[bs]", shape[:1], torch.int32, device
        )

    @property
    def num_correct_drafts(self) -> torch.Tensor:
        """`[bs]` int32, accepted drafts without the bonus token."""
        return self.accept_lens - 1

    def validate(self) -> None:
        """Check that lengths and rows agree; waits for an accelerator."""
        differs = self.accept_lens != (self.accept_index >= 0).sum(1)
        if differs.any():
            _refuse("accept_lens", self.accept_lens, differs, "the rows on the path")


def _total_host(ends: torch.Tensor) -> int:
    return int(ends[-1]) if ends.shape[0] else 0


def _refuse(name: str, values: torch.Tensor, bad: torch.Tensor, wanted: str) -> None:
    where = [int(i) for i in bad.nonzero()[0]]
    value = values[tuple(where)].item()
    raise ValueError(f"{name} must be {wanted}, got {value} at {where}")
