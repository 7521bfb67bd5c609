"""Chat with a running server through the OpenAI client, streamed.

    python examples/openai_client.py [--base-url http://127.0.0.1:30000] [QUESTION]

Nothing in it knows TETRIS. The numbers at the end come through `return_meta_info`,
SGLang's own extension of the protocol for answers that are not streamed.
"""

import argparse

import openai

QUESTION = "Name three things that make a good cup of tea."


def ask(base_url: str, question: str) -> tuple[str, int]:
    """Print the answer as it comes; return it and the number of its tokens."""
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces, num_tokens = [], 0
    for chunk in stream:
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            piece = choice.delta.content or ""
            pieces.append(piece)
            print(piece, end="", flush=True)
    print()
    return "".join(pieces), num_tokens


def ask_for_numbers(base_url: str, question: str) -> dict[str, object]:
    """Ask again, not streamed, and return SGLang's `meta_info` of the answer."""
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none")
    reply = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=64,
        extra_body={"return_meta_info": True},
    )
    meta: dict[str, object] = reply.choices[0].model_dump()["meta_info"]
    return meta


def main() -> None:
    """Ask one question twice: for the text, and for the drafts behind it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    parser.add_argument("question", nargs="?", default=QUESTION)
    options = parser.parse_args()
    _text, num_tokens = ask(options.base_url, options.question)
    print(f"[{num_tokens} tokens]")
    meta = ask_for_numbers(options.base_url, options.question)
    for name, value in meta.items():
        if name.startswith("spec_num") or name in ("spec_verify_ct", "tetris"):
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
