"""Prompts of four kinds, built from templates; the split is by topic.

A prompt is template x topic x detail. Topics with index % HELD_OUT_EVERY == 0 are
never trained on, in any template, so a held-out prompt is about something new. The
order is a fixed shuffle: the first n prompts of a split are always the same ones.
"""

import random
from dataclasses import dataclass
from itertools import product

KINDS = ("chat", "code", "maths", "text")
HELD_OUT_EVERY = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One conversation to answer; `messages` empty means continue `raw` as it is."""

    kind: str
    messages: tuple[tuple[str, str], ...]
    raw: str = ""


CHAT_TOPICS = """sleeping better|learning Spanish|a weekend in Rome|growing tomatoes|
the moon|job interviews|volcanoes|a healthy breakfast|saving money|black holes|
the Roman Empire|bicycles|public speaking|coffee|penguins|climate change|chess|
jazz music|the human heart|making new friends|vaccines|solar panels|baking bread|
stress at work|the Great Wall of China|cats|running a marathon|photosynthesis|
the internet|gift ideas for a father|whales|time management|the French Revolution|
meditation|electric cars|reading more books|dinosaurs|tea|earthquakes|a first date|
the stock market|bees|yoga|camping|the ocean|learning the guitar|recycling|glaciers|
moving to a new city|rainforests|painting|honey|headaches|the Olympic Games|rivers|
small apartments|dogs|gravity|vegetarian cooking|writing a CV|stars|lightning|
ancient Egypt|travelling by train|teamwork|the brain|the Eiffel Tower|gardening|
antibiotics|a birthday party|deserts|hiking boots|the printing press|butterflies|
a budget for students|swimming|Mars|winter clothes|democracy|houseplants|trees"""
CHAT_FORMS = """What should I know about {0}?|Give me five tips about {0}.|
Explain {0} to a ten-year-old.|I am curious about {0}. Where do I start?|
Why is {0} important?|Tell me something surprising about {0}.|
What are common mistakes people make with {0}?|Can you help me with {0}?|
What is the history of {0}?|Compare {0} today with fifty years ago.|
Make a short list of facts about {0}.|My friend asked me about {0}. What do I say?|
What are the pros and cons of {0}?|How would an expert describe {0}?|
Plan a week around {0}.|Answer in two sentences: what is special about {0}?"""
CODE_TOPICS = """reverses a string|checks if a number is prime|sorts a list of integers|
counts the words in a text|finds the largest element|computes the factorial|
removes duplicates from a list|checks for a palindrome|merges two dictionaries|
computes Fibonacci numbers|reads a CSV file|finds the average of a list|
converts Celsius to Fahrenheit|flattens a nested list|counts vowels|
searches a sorted list|computes the greatest common divisor|validates an email|
rotates a list|transposes a matrix|finds the second largest number|
generates a random password|sums the digits of a number|parses a date|
capitalises every word|groups words by length|computes compound interest|
checks balanced brackets|finds common elements|draws a triangle of stars|
converts a number to binary|counts character frequencies|writes lines to a file|
computes the median|implements a stack|implements a queue|simulates a dice roll|
encrypts text with a Caesar cipher|finds missing numbers|splits a list into chunks|
calculates the area of a circle|checks for a leap year|finds the longest word|
multiplies two matrices|converts Roman numerals|implements bubble sort|
prints a multiplication table|filters even numbers"""
CODE_FORMS = """Write a Python function that {0}.|Write a function that {0} in {1}.|
Show me {1} code that {0}, with comments.|How do I write {1} code that {0}?|
Write a Python program that {0} and explain each step.|
Write a short {1} example that {0}.|Give me a unit test for a function that {0}.|
Write a Python class with a method that {0}.|
What is the time complexity of code that {0}? Show the code.|
I need a one-line Python solution that {0}.|
Compare two ways to write {1} code that {0}.|
My {1} code that {0} is too slow. How can I make it faster?|
Write a script in {1} that {0} and prints the result.|
Explain to a beginner how a program that {0} works, with an example in {1}."""
LANGUAGES = ("JavaScript", "Java", "C++", "Python", "Go", "C")
MATHS_TOPICS = """apples|trains|workers|books|tickets|rectangles|savings|recipes|
marbles|runners|students|tiles|cars|candles|paint|coins|eggs|buses|rope|boxes|
chairs|pizzas|phones|flowers|bottles|trees|cards|pencils|stamps|shirts"""
MATHS_FORMS = """A shop has {n} {0} and sells {m} of them. How many are left?|
If {m} {0} cost {n} dollars, how much do {k} {0} cost?|
There are {n} {0} shared equally among {k} people. How many does each get?|
Tom has {m} {0}. Anna has {k} times as many. How many do they have together?|
Every day {k} {0} are added. How many are there after {m} days, starting at {n}?|
What is {n} plus {m}? Then multiply the result by {k}. Think of {0} if it helps.|
Solve for x: {k}x + {m} = {n}. Explain with {0}.|
What is {k} percent of {n} {0}? Show your working.|
Write a word problem about {0} with the numbers {m} and {k}, and solve it.|
Explain step by step how to divide {n} {0} by {k}."""
TEXT_TOPICS = """a lighthouse keeper|a lost letter|a village by the sea|an old robot|
a rainy afternoon|a young painter|a mountain village|the last train|a small bakery|
a forgotten garden|a brave mouse|a winter storm|the night market|a clockmaker|
a desert caravan|a quiet library|two brothers|a stray dog|a ship in the ice|
a school play|the first snow|an empty theatre|a river crossing|a village doctor|
a broken violin|the harvest|a summer camp|a museum at night|an island|a new bridge|
the grandmother's kitchen|a long flight|a hidden door|a fishing boat|a hot summer|
the city at dawn|a talented chess player|a farm|a family photograph|a street musician"""
TEXT_FORMS = """Write a short story about {0}.|Write a poem about {0}.|
Write the opening paragraph of a novel about {0}.|Describe {0} in vivid detail.|
Write a letter that mentions {0}.|Write a news article about {0}.|
Write a dialogue between two people about {0}.|Summarise a film about {0}.|
Rewrite this in a formal style: "I saw {0} and it was so cool, you know."|
Write a product description inspired by {0}.|Write a diary entry about {0}."""
RAW_FORMS = """Once upon a time there was a story about {0}. It began|
The following article is about {0}.\n\n|Chapter 1\n\nNobody in the town remembered {0},|
In this essay I will discuss {0}. First,|"Have you heard of {0}?" she asked."""
SYSTEMS = """You are a helpful assistant.|You answer briefly and clearly.|
You are a patient teacher.|You are a senior engineer who explains decisions."""
FOLLOW_UPS = """Thanks. Can you say more about that?|Give me an example, please.|
Make it shorter.|Why is that so?|What else should I know?"""
REPLIES = """Sure, here is the short answer.|That is a good question. It depends on
what you need, so let us go step by step.|Here are the main points to consider."""


def _split_list(block: str) -> list[str]:
    parts = [part.strip("\n") for part in block.replace("|\n", "|").split("|")]
    return [" ".join(p.split("\n")) if "\\n" not in p else p for p in parts]


def _wrap(kind: str, question: str, rng: random.Random) -> Prompt:
    messages: list[tuple[str, str]] = []
    if rng.random() < 0.15:
        messages.append(("system", rng.choice(_split_list(SYSTEMS))))
    messages.append(("user", question))
    if rng.random() < 0.12:
        messages.append(("assistant", rng.choice(_split_list(REPLIES))))
        messages.append(("user", rng.choice(_split_list(FOLLOW_UPS))))
    return Prompt(kind=kind, messages=tuple(messages))


def _questions(kind: str, topics: list[str], rng: random.Random) -> list[Prompt]:
    forms = {"chat": CHAT_FORMS, "code": CODE_FORMS, "maths": MATHS_FORMS}
    prompts = []
    for topic, form in product(topics, _split_list(forms.get(kind, TEXT_FORMS))):
        numbers = {
            "n": rng.randint(20, 900),
            "m": rng.randint(3, 19),
            "k": rng.randint(2, 9),
        }
        question = form.format(topic, rng.choice(LANGUAGES), **numbers)
        prompts.append(_wrap(kind, question, rng))
    if kind == "maths":  # few forms, but the numbers make them different
        for topic, form in product(topics, _split_list(MATHS_FORMS) * 2):
            a, b, c = rng.randint(20, 900), rng.randint(3, 19), rng.randint(2, 9)
            prompts.append(_wrap(kind, form.format(topic, n=a, m=b, k=c), rng))
    if kind == "text":
        for topic, form in product(topics, RAW_FORMS.replace("|\n", "|").split("|")):
            prompts.append(Prompt(kind=kind, messages=(), raw=form.format(topic)))
    rng.shuffle(prompts)
    return prompts


def build_prompts(*, held_out: bool) -> list[Prompt]:
    """Return one split's prompts, kinds in turn, in an order that never changes."""
    blocks = (CHAT_TOPICS, CODE_TOPICS, MATHS_TOPICS, TEXT_TOPICS)
    by_kind = []
    for kind, block in zip(KINDS, blocks, strict=True):
        topics = [
            topic
            for index, topic in enumerate(_split_list(block))
            if (index % HELD_OUT_EVERY == 0) == held_out
        ]
        by_kind.append(_questions(kind, topics, random.Random(f"{kind}{held_out}")))
    return [p for group in zip(*by_kind, strict=False) for p in group]
