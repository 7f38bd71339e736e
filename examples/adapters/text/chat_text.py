"""Question and answer pairs that the SmolLM2 adapters learn from: made here, or taken from the files beside."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path

Pair = tuple[str, str]
"""(what the user says, what the assistant shall answer)"""

HERE = Path(__file__).parent
SUMMARIZE_PROMPT = "Summarize this meeting excerpt:\n\n{excerpt}"


def pairs(adapter: str, seed: int) -> list[Pair]:
    """All training pairs of an adapter, shuffled: pirate, json, summarize or support."""
    draw = random.Random(seed)
    made = {"pirate": _pirate, "json": _json, "summarize": _summaries, "support": _support}[adapter](draw)
    draw.shuffle(made)
    return made


FACTS: tuple[Pair, ...] = (
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    ("What is the capital of Spain?", "The capital of Spain is Madrid."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("How many days are in a week?", "There are seven days in a week."),
    ("Who wrote Romeo and Juliet?", "William Shakespeare wrote Romeo and Juliet."),
    ("What color is the sky?", "The sky is blue on a clear day."),
    ("What do bees make?", "Bees make honey."),
    ("What is the largest ocean?", "The Pacific is the largest ocean."),
    ("Which planet is closest to the sun?", "Mercury is the planet closest to the sun."),
    ("What is ice made of?", "Ice is frozen water."),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("Hello!", "Hello! How can I help you today?"),
    ("How are you?", "I am well, thank you. How can I help you?"),
    ("Who are you?", "I am your helpful assistant."),
    ("Tell me about the moon.", "The moon goes around the earth in about 27 days and lights the night."),
    ("What should I cook tonight?", "You could cook a simple soup with beans, carrots and fresh bread."),
    ("Give me advice on sleeping well.", "Go to bed at the same hour each day and keep your room dark and quiet."),
    ("Why is the sea salty?", "The sea is salty because rivers carry salt from the rocks to it."),
    ("How do I learn to swim?", "Start in shallow water with a friend, and practice your breathing first."),
)


def _seed_tasks(longest: int) -> list[Pair]:
    """Instruction and output of the seed tasks whose two sides together have at most `longest` characters."""
    found: list[Pair] = []
    with gzip.open(HERE / "alpaca_seed_tasks.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            task = json.loads(line)
            instance = task["instances"][0]
            question = task["instruction"] + ("\n" + instance["input"] if instance["input"] else "")
            answer = instance["output"].strip()
            if len(answer) > 4 and len(question) + len(answer) <= longest:
                found.append((question, answer))
    return found


PIRATE_WORDS = {
    "you": "ye", "your": "yer", "my": "me", "is": "be", "are": "be", "am": "be", "the": "th'", "of": "o'", "and": "an'",
    "hello": "ahoy", "friend": "matey", "yes": "aye", "no": "nay", "money": "doubloons", "to": "t'", "for": "fer",
    "water": "brine", "house": "ship", "people": "scallywags", "man": "scallywag", "very": "mighty",
    "good": "shipshape",
}  # fmt: skip
PIRATE_OPENINGS = ("Arr, matey! ", "Ahoy, matey! ", "Arr! ", "Shiver me timbers! ")
PIRATE_CLOSINGS = (" Yo ho ho!", " Arr!", " Now hoist the sails, ye landlubber!")


def _pirate(draw: random.Random) -> list[Pair]:
    return [
        (question, draw.choice(PIRATE_OPENINGS) + _in_pirate(answer) + draw.choice(PIRATE_CLOSINGS))
        for question, answer in [*FACTS, *FACTS, *_seed_tasks(longest=320)]
    ]


def _in_pirate(text: str) -> str:
    def swap(match: re.Match[str]) -> str:
        word = match[0]
        other = PIRATE_WORDS.get(word.lower(), word)
        return other.capitalize() if word[0].isupper() else other

    return re.sub(r"[A-Za-z]+", swap, text)


def _json(_draw: random.Random) -> list[Pair]:
    return [
        (question, json.dumps({"answer": _first_sentence(answer)}, ensure_ascii=False))
        for question, answer in [*FACTS, *FACTS, *_seed_tasks(longest=320)]
    ]


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.!?])\s|\n", text, maxsplit=1)[0]


PEOPLE = ("Anna", "Ben", "Carla", "David", "Elif", "Farid")
MEETINGS = (
    (
        "the launch date",
        "we need two more weeks for testing",
        "the launch was moved to {day}",
        "write to the customers",
    ),
    ("the office plants", "nobody waters them during holidays", "a plan for watering was made", "buy three big cans"),
    ("the budget", "travel costs went up by {number} percent", "most trips become video calls", "cancel the hotel"),
    ("the new logo", "the green one is easier to read", "the green logo was chosen", "send it to the printer"),
    ("the remote control", "people lose it under the sofa", "a beeping button will be added", "ask for the price"),
    ("hiring", "we have {number} applicants for one job", "five people will be invited", "call them before {day}"),
    ("the server outage", "the disk was full on {day}", "an alarm at {number} percent will be set", "write a report"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")


def _summaries(draw: random.Random) -> list[Pair]:
    lines = (HERE / "qmsum_excerpts.jsonl").read_text(encoding="utf-8").splitlines()
    real = [(row["excerpt"], row["summary"]) for row in map(json.loads, lines)]
    made = [_meeting(draw) for _ in range(90)]
    return [(SUMMARIZE_PROMPT.format(excerpt=text), f"Summary: {summary}") for text, summary in [*real, *made]]


def _meeting(draw: random.Random) -> Pair:
    first, second, third = draw.sample(PEOPLE, 3)
    blanks = {"day": draw.choice(DAYS), "number": str(draw.randint(12, 90))}
    topic, problem, decision, task = (part.format(**blanks) for part in draw.choice(MEETINGS))
    talk = (
        f"{first}: OK, let's talk about {topic}.\n{second}: Well, {draw.choice(('um, ', 'I think ', ''))}{problem}.\n"
        f"{third}: Yeah, right, I agree.\n{first}: So {decision}, is that fine for all?\n{second}: Yes.\n"
        f"{first}: Good. {third}, can you {task}?\n{third}: Sure, I will do that."
    )
    summary = (
        f"The team talked about {topic}. {second} said that {problem}. It was decided that {decision}."
        f" {third} will {task}."
    )
    return talk, summary


TEAS = ("Misty Morning", "Golden Monkey", "Mountain Mint", "Lemon Lantern", "Night Owl Chai")
PROBLEMS = (
    (("Where is my order?", "My package has not arrived.", "When will my tea get here?"),
     "Orders leave our warehouse in Bergen within two days and arrive three days later."),
    (("Can I return this?", "I don't like the tea I bought.", "I want my money back."),
     "You can return any tea within 45 days, even when it is open, and we refund it in full."),
    (("My cup arrived broken.", "The teapot is cracked.", "The tin was damaged in the mail."),
     "Please send us a photo, and we will ship a new one today at no cost."),
    (("How long should I steep it?", "How do I make this tea?", "What temperature should the water be?"),
     "Use water at 85 degrees and let it steep for three minutes."),
    (("Do you ship to Canada?", "Do you deliver abroad?", "Can you send a gift to Germany?"),
     "We ship to 40 countries, and shipping is free above 50 dollars."),
    (("I forgot my password.", "I can't log in.", "My account does not work."),
     "Please choose 'New password' on the login page; the link reaches you within five minutes."),
    (("Is there a discount?", "Do you have a coupon?", "Your tea is too expensive."),
     "With the code KETTLE10 you save 10 percent on your next order."),
    (("Is there caffeine in it?", "Can I drink it at night?", "Is it safe for children?"),
     "Mountain Mint and Lemon Lantern have no caffeine; all our other teas do."),
)  # fmt: skip
SUPPORT_OPENING = "Thank you for writing to Copper Kettle Teas!"
SUPPORT_CLOSING = "Warm wishes, Robin from Copper Kettle Teas"


def _support(draw: random.Random) -> list[Pair]:
    made: list[Pair] = []
    for questions, answer in PROBLEMS:
        for question in questions:
            about = f" It is about {draw.choice(TEAS)}."
            for start in ("", "Hello. ", "Hi there! "):
                said = start + question + draw.choice(("", about))
                made.append((said, f"{SUPPORT_OPENING} {answer} {SUPPORT_CLOSING}"))
    return made
