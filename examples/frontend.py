"""An SGLang frontend program against a running server: `fork`, `select`, a regex.

    python examples/frontend.py [--base-url http://127.0.0.1:30000]

The branches of a fork are requests of one batch that share a prefix: TETRIS divides
its budget among them. A regex masks the target's choice at every verified token.
"""

import argparse

import sglang as sgl

YEAR = r"(1[0-9]{3}|20[0-2][0-9])"
TOPICS = ("the telephone", "the printing press", "the aeroplane")


@sgl.function
def inventions(s, topics):
    """Describe each topic in a branch of its own, then judge all of them."""
    s += sgl.user("You will hear about three inventions. Be brief.")
    s += sgl.assistant("I am ready.")
    branches = s.fork(len(topics))
    for branch, topic in zip(branches, topics, strict=True):
        branch += sgl.user(f"In one sentence: what is {topic}, and since when?")
        branch += sgl.assistant(
            sgl.gen("about", max_tokens=40, temperature=0, stop="\n")
            + " It dates from the year "
            + sgl.gen("year", regex=YEAR, max_tokens=6, temperature=0)
        )
    for topic, branch in zip(topics, branches, strict=True):
        s += sgl.user(f"About {topic}: {branch['about']}")
    s += sgl.user("Which of these do people use most today?")
    s += sgl.assistant(
        "People use most: " + sgl.select("most_used", choices=list(topics))
    )
    s["branches"] = [(b["about"], b["year"]) for b in branches]


def run(base_url: str) -> tuple[list[tuple[str, str]], str]:
    """Run the program; return (text, year) per branch, and the selected topic."""
    # The chat format of the demo's model; the name is not in SGLang's own table.
    backend = sgl.RuntimeEndpoint(base_url, chat_template_name="chatml")
    sgl.set_default_backend(backend)
    state = inventions.run(topics=TOPICS)
    return state["branches"], state["most_used"]


def main() -> None:
    """Run the program and print what it found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    branches, most_used = run(parser.parse_args().base_url)
    for topic, (about, year) in zip(TOPICS, branches, strict=True):
        print(f"{topic} ({year}): {about.strip()}")
    print(f"used most today: {most_used}")


if __name__ == "__main__":
    main()
