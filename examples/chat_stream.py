"""Stream chat answers from a running server, many at once, and count what it did.

The native `/generate` endpoint is used because its streamed chunks carry `meta_info`,
where SGLang and TETRIS report rounds and drafts per request; the chat template is
applied here.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

PROMPTS = Path(__file__).resolve().parents[1] / "benchmark" / "serving" / "prompts.json"
REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A chat prompt: its kind, what the user said, and the templated token ids."""

    kind: str
    question: str
    input_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished answer and the server's numbers for it; 0 where it reports none."""

    text: str
    num_tokens: int
    num_rounds: int
    num_verify_drafts: int
    num_correct_drafts: int
    first_token_s: float
    finished_s: float

    @property
    def accept_length(self) -> float:
        """Tokens per round, bonus token included; 0 without rounds.

        Not num_tokens / num_rounds: the prompt step gives the first token.
        """
        rounds = self.num_rounds
        return (self.num_correct_drafts + rounds) / rounds if rounds else 0.0


def load_prompts(model: Path, count: int, skip: int = 0) -> list[Prompt]:
    """Return `count` prompts after the first `skip`, the four kinds in turn."""
    from transformers import AutoTokenizer  # slow to import: wanted off the main path

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = []
    for row in json.loads(PROMPTS.read_text())[skip : skip + count]:
        question = row["conversations"][0]["value"]
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=True,
        )
        prompts.append(
            Prompt(
                kind=row["id"].rpartition("-")[0],
                question=question,
                input_ids=list(encoded["input_ids"]),
            )
        )
    return prompts


def stream_all(
    url: str,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    on_tokens: Callable[[int, int, bool], None] = lambda index, new, done: None,
) -> list[Answer]:
    """Send all prompts at once at temperature 0; return the answers in their order.

    Args:
        on_tokens: called as (index, new tokens, finished) for every streamed chunk.

    Raises:
        RuntimeError: the server refused or broke off a request.
    """
    return asyncio.run(_stream_all(url, prompts, max_new_tokens, on_tokens))


async def _stream_all(url, prompts, max_new_tokens, on_tokens) -> list[Answer]:
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        start = time.perf_counter()
        tasks = (
            _stream_one(session, url, index, prompt, max_new_tokens, on_tokens, start)
            for index, prompt in enumerate(prompts)
        )
        return await asyncio.gather(*tasks)


async def _stream_one(
    session, url, index, prompt, max_new_tokens, on_tokens, start
) -> Answer:
    body = {
        "input_ids": prompt.input_ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens},
        "stream": True,
    }
    last, seen, first_token_s = None, 0, 0.0
    async with session.post(f"{url}/generate", json=body) as reply:
        if reply.status != 200:
            raise RuntimeError(f"{url}: {reply.status} {await reply.text()}")
        async for line in reply.content:
            data = line.decode().strip().removeprefix("data:").strip()
            if not data or data == "[DONE]":
                continue
            last = json.loads(data)
            if "error" in last:
                raise RuntimeError(f"{url}: {last['error']}")
            num_tokens = last["meta_info"]["completion_tokens"]
            first_token_s = first_token_s or time.perf_counter() - start
            on_tokens(index, num_tokens - seen, False)
            seen = num_tokens
    if last is None or last["meta_info"].get("finish_reason") is None:
        raise RuntimeError(f"{url}: the answer to request {index} broke off.")
    on_tokens(index, 0, True)
    meta = last["meta_info"]
    return Answer(
        text=last["text"],
        num_tokens=meta["completion_tokens"],
        num_rounds=meta.get("spec_verify_ct", 0),
        num_verify_drafts=meta.get("spec_num_verify_drafts", 0),
        num_correct_drafts=meta.get("spec_num_correct_drafts", 0),
        first_token_s=first_token_s,
        finished_s=time.perf_counter() - start,
    )
