"""The draft reads nothing that it has not written, and catches up on what was kept."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang_tetris.adapter.draft_coverage import DraftCoverage

ROWS, LENGTH = 4, 40


def coverage(lead: int, kept: int = 4, takes_starts: bool = True) -> DraftCoverage:
    """Row r's position p lies in slot 100 * r + p."""
    slots = 100 * torch.arange(ROWS)[:, None] + torch.arange(LENGTH)
    return DraftCoverage(
        req_to_token_pool=SimpleNamespace(req_to_token=slots.to(torch.int32)),
        num_slots=100 * ROWS,
        lead=lead,
        kept_tokens=kept,
        takes_starts=takes_starts,
        device="cpu",
    )


def prompt(found: DraftCoverage, row: int, begin: int, end: int) -> None:
    found.begin_prompt([row], [begin])
    found.wrote(100 * row + torch.arange(begin, end))
    found.end_prompt([row], [end], torch.tensor([1000 + end]))


def skip(
    found: DraftCoverage, rows: list[int], begins: list[int], ends: list[int]
) -> None:
    """A step over prompts whose token at position p is 1000 + p, not read."""
    found.begin_prompt(rows, begins)
    parts = [torch.arange(*part) for part in zip(begins, ends, strict=True)]
    text = torch.cat(parts)
    lens = [len(part) for part in parts]
    slots = text + 100 * torch.tensor(rows).repeat_interleave(torch.tensor(lens))
    found.skip_prompt(
        rows,
        begins,
        lens,
        1000 + text,
        1000 + torch.tensor(ends),
        None if found.lead else 1000.0 + text[:, None],
        slots,
    )


def keep(found: DraftCoverage, row: int, seq_len: int, emitted: int = 1) -> None:
    """One round that emits tokens 1000 + position, not drafted."""
    tokens = 1000 + seq_len + 1 + torch.arange(emitted)
    hidden = None if found.lead else tokens[:, None].float() - 1
    slots = 100 * row + seq_len + torch.arange(emitted)
    found.keep([row], [seq_len], [emitted], tokens, hidden, slots)


def written(found: DraftCoverage, row: int, length: int) -> list[bool]:
    unwritten = found.unwritten().tolist()
    return [100 * row + place not in unwritten for place in range(length)]


@pytest.mark.parametrize("lead", [0, 1])
def test_what_was_emitted_undrafted_is_caught_up_in_bulk(lead: int) -> None:
    found = coverage(lead)
    prompt(found, 1, 0, 10)
    assert found.is_current(1, 10) is (lead == 0)
    keep(found, 1, 10)
    keep(found, 1, 11, emitted=2)
    entries = found.take([1], [13])
    # An EAGLE head has seen the first emitted token with the prompt.
    assert (entries.first, entries.lens) == (([10], [3]) if lead == 0 else ([9], [4]))
    if lead:
        assert entries.tokens.tolist() == [1010, 1011, 1012, 1013]
        assert entries.hidden is None
    else:
        assert entries.tokens.tolist() == [1011, 1012, 1013]
        assert entries.hidden[:, 0].tolist() == [1010, 1011, 1012]
    assert found.starts[1] == 0, "nothing was lost"
    found.cover([1], [13])
    assert found.is_current(1, 13)


@pytest.mark.parametrize("lead", [0, 1])
def test_what_was_not_kept_is_a_gap_and_the_draft_starts_after_it(lead: int) -> None:
    found = coverage(lead)
    prompt(found, 0, 0, 10)
    for seq_len in range(10, 20):
        keep(found, 0, seq_len)
    entries = found.take([0], [20])
    assert (entries.first, entries.lens) == ([16], [4]), "the last four are kept"
    assert entries.tokens.tolist() == [1017, 1018, 1019, 1020]
    assert found.starts[0] == 16 + lead
    assert not found.can_draft(0, 20) or found.takes_starts


def test_a_cached_prompt_starts_after_its_last_unwritten_slot() -> None:
    found = coverage(0)
    prompt(found, 0, 0, 10)
    found.wrote(torch.tensor([10, 11]))  # drafts of an earlier owner
    keep(found, 0, 10)
    keep(found, 0, 11)
    # Another request hits the first 12 positions in the radix cache: the same slots.
    found._pool.req_to_token[2, :12] = found._pool.req_to_token[0, :12].clone()
    found.begin_prompt([2], [12])
    assert found.starts[2] == 12
    # One that hits only what was drafted starts at the beginning.
    found.begin_prompt([2], [10])
    assert found.starts[2] == 0
    assert written(found, 0, 13) == [True] * 10 + [False] * 3


def test_a_slot_given_to_another_request_is_marked_by_what_came_last() -> None:
    found = coverage(0)
    prompt(found, 0, 0, 10)
    keep(found, 0, 10)
    found.wrote(torch.tensor([10]))  # the request has ended, and another drafts here
    assert written(found, 0, 11) == [True] * 11


@pytest.mark.parametrize("lead", [0, 1])
def test_many_rounds_in_a_row_are_all_kept(lead: int) -> None:
    found = coverage(lead, kept=27)
    for row in (1, 2):
        prompt(found, row, 0, 5)
    for seq_len in range(5, 30):
        keep(found, 1, seq_len)
        if seq_len % 2:
            keep(found, 2, 5 + (seq_len - 5) // 2 * 2, emitted=2)
    entries = found.take([1, 2], [30, 31])
    first = 6 - lead
    assert entries.lens == [25 + lead, 26 + lead]
    text = [*range(first, 31), *range(first, 32)]
    assert entries.tokens.tolist() == [1000 + place for place in text]
    if not lead:
        assert entries.hidden[:, 0].tolist() == [999 + place for place in text]


def test_a_slot_used_again_does_not_keep_its_mark() -> None:
    found = coverage(0)
    prompt(found, 0, 0, 10)
    found.wrote(torch.arange(10, 14))  # drafts of an earlier owner
    keep(found, 0, 10, emitted=3)
    assert written(found, 0, 14)[10:13] == [False] * 3


def test_the_anchor_that_a_standalone_draft_has_read_keeps_its_mark() -> None:
    found = coverage(1)
    prompt(found, 0, 0, 10)
    found.take([0], [10])
    found.wrote(torch.tensor([10]))
    found.cover([0], [10])
    keep(found, 0, 10, emitted=2)
    assert written(found, 0, 12) == [True] * 11 + [False]


@pytest.mark.parametrize(("emitted", "able"), [(4, True), (5, False)])
def test_without_starts_a_request_with_a_gap_drafts_no_more(emitted, able) -> None:
    found = coverage(0, takes_starts=False)
    prompt(found, 0, 0, 10)
    for seq_len in range(10, 10 + emitted):
        keep(found, 0, seq_len)
    assert found.can_draft(0, 10 + emitted) is able


def test_a_row_given_to_another_request_starts_afresh() -> None:
    found = coverage(0)
    prompt(found, 0, 0, 10)
    for seq_len in range(10, 20):
        keep(found, 0, seq_len)
    found.take([0], [20])
    assert found.starts[0] > 0
    prompt(found, 0, 0, 5)
    assert found.starts[0] == 0
    assert found.is_current(0, 5)


def test_several_requests_at_once() -> None:
    found = coverage(0, kept=8)
    for row, end in ((0, 4), (2, 9)):
        prompt(found, row, 0, end)
    tokens = torch.tensor([1, 2, 3, 4, 5])
    slots = torch.tensor([209, 210, 4, 5, 6])
    found.keep([2, 0], [9, 4], [2, 3], tokens, tokens[:, None].float(), slots)
    entries = found.take([0, 2], [7, 11])
    assert entries.tokens.tolist() == [3, 4, 5, 1, 2]
    assert entries.hidden[:, 0].tolist() == [3, 4, 5, 1, 2]
    assert (entries.first, entries.lens) == ([4, 9], [3, 2])


@pytest.mark.parametrize("lead", [0, 1])
def test_a_prompt_that_was_not_read_is_caught_up_whole_if_it_was_kept(lead) -> None:
    found = coverage(lead, kept=16)
    skip(found, [3, 1], [0, 0], [5, 9])
    keep(found, 1, 9)
    entries = found.take([1, 3], [10, 5])
    # The draft's position 0 is entry -1 of a standalone draft: a token without one
    # before it.
    assert entries.first == [-lead, -lead]
    assert entries.lens == [10 + lead, 5 + lead]
    text = [*range(1 - lead, 11), *range(1 - lead, 6)]
    assert entries.tokens.tolist() == [1000 + place for place in text]
    if not lead:
        assert entries.hidden[:, 0].tolist() == [999 + place for place in text]
    assert found.starts.tolist() == [0] * ROWS, "nothing was lost"
    assert written(found, 1, 10) == [False] * 10


@pytest.mark.parametrize("lead", [0, 1])
def test_of_a_long_prompt_that_was_not_read_the_end_is_kept(lead) -> None:
    found = coverage(lead, kept=4)
    found.wrote(torch.arange(20))  # an earlier owner's
    skip(found, [0], [0], [20])
    entries = found.take([0], [20])
    assert (entries.first, entries.lens) == ([16], [4])
    assert entries.tokens.tolist() == [1017, 1018, 1019, 1020]
    if not lead:
        assert entries.hidden[:, 0].tolist() == [1016, 1017, 1018, 1019]
    assert found.starts[0] == 16 + lead
    assert written(found, 0, 20) == [False] * 20


@pytest.mark.parametrize("lead", [0, 1])
def test_a_part_that_was_not_read_goes_on_after_one_that_was(lead) -> None:
    found = coverage(lead, kept=16)
    prompt(found, 0, 0, 10)
    skip(found, [0], [10], [14])
    entries = found.take([0], [14])
    assert (entries.first, entries.lens) == ([10 - lead], [4 + lead])
    assert entries.tokens.tolist() == [1000 + p for p in range(11 - lead, 15)]
    assert found.starts[0] == 0


@pytest.mark.parametrize("lead", [0, 1])
def test_a_part_after_one_that_was_not_read_starts_at_its_own_begin(lead) -> None:
    found = coverage(lead, kept=16)
    skip(found, [0], [0], [10])
    skip(found, [0], [10], [14])
    entries = found.take([0], [14])
    assert (entries.first, entries.lens) == ([10 - lead], [4 + lead])
    assert found.starts[0] == 10
    # Read at last, and by the next request that has the text in the cache too.
    found.begin_prompt([0], [14])
    found.wrote(torch.arange(14, 18))
    found.end_prompt([0], [18], torch.tensor([1018]))
    assert found.starts[0] == 14
    assert found.is_current(0, 18) is (lead == 0)
