"""A user's program: an `sglang.Engine` with TETRIS, set up through `configure`.

    python engine_program.py TARGET DRAFT

Prints one JSON object per line: the answer, then what a refused engine said.
"""

import json
import sys

import sglang

import sglang_tetris


def main(target: str, draft: str) -> None:
    common = {
        "model_path": target,
        "speculative_algorithm": "TETRIS",
        "dtype": "float32",
        "max_total_tokens": 20000,
        "mem_fraction_static": 0.6,
        "log_level": "error",
    }
    sglang_tetris.configure(tetris_budget="2x", tetris_draft="eagle")
    try:
        sglang.Engine(**common, speculative_draft_model_path=target)
    except ValueError as error:
        print(json.dumps({"refused": str(error)}), flush=True)
    sglang_tetris.configure(tetris_budget="2x", tetris_draft="standalone")
    engine = sglang.Engine(
        **common,
        speculative_draft_model_path=draft,
        speculative_num_steps=2,
        speculative_eagle_topk=2,
    )
    reply = engine.generate(
        input_ids=[[5, 9, 33, 12]],
        sampling_params={"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True},
    )[0]
    print(json.dumps({"ids": reply["output_ids"], "meta": reply["meta_info"]}))
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
