"""200 requests, 16 at a time, some aborted: no error, and no slot is lost."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e import models
from tests.e2e.pool import ServerPool, set_budget, tetris_flags, tetris_info
from tests.e2e.test_exactness_tiny import TREE, draft_path

REQUESTS, CONCURRENT = 200, 16


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.server(f"{kind}-tree"))
        for kind in ("eagle", "standalone")
    ],
)
def test_mixed_load_with_aborts_leaves_the_pools_as_they_were(
    pool: ServerPool, model_root: Path, kind: str
) -> None:
    target = models.make_target(model_root)
    server = pool.get(target, tetris_flags(draft_path(kind, model_root), **TREE))
    set_budget(server, "1x")
    begin = tetris_info(server)["kv_pool"]
    assert begin["free"] + begin["evictable"] == begin["size"]
    draw = random.Random(3)
    jobs = [
        {
            "rid": f"soak-{kind}-{i}",
            "input_ids": [
                draw.randrange(2, 512) for _ in range(draw.randrange(1, 200))
            ],
            "sampling_params": {
                "max_new_tokens": draw.choice((1, 2, 3, 17, 60)),
                "temperature": draw.choice((0.0, 0.7, 1.3)),
                "frequency_penalty": draw.choice((0.0, 0.0, 0.5)),
                "ignore_eos": True,
            },
            "abort_after": draw.choice((None, None, None, 0.005, 0.03, 0.2)),
        }
        for i in range(REQUESTS)
    ]

    def run(job: dict) -> dict:
        after = job.pop("abort_after")
        if after is not None:
            body = {"rid": job["rid"], "abort_all": False}
            threading.Timer(after, lambda: server.post("/abort_request", body)).start()
        return server.post("/generate", job) | {"wanted": job["sampling_params"]}

    with ThreadPoolExecutor(CONCURRENT) as workers:
        replies = list(workers.map(run, jobs))
    finished = [
        r for r in replies if r["meta_info"]["finish_reason"]["type"] == "length"
    ]
    assert len(finished) >= REQUESTS // 2
    for reply in finished:
        assert len(reply["output_ids"]) == reply["wanted"]["max_new_tokens"]
    # Idle SGLang checks its own pools and would have ended the server on a leak.
    end = tetris_info(server)["kv_pool"]
    assert end["free"] + end["evictable"] == end["size"] == begin["size"]
    server.flush_cache()
    assert tetris_info(server)["kv_pool"]["free"] == begin["size"]
    assert server.generate([[5, 6, 7]], max_new_tokens=4)
