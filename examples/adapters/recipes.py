"""What each demo adapter is: its base, its LoRA form, its training budget and the prompts that show what it changed.

Together the recipes cover the forms that Garnish serves: ranks 4 to 64, rsLoRA, rank and alpha patterns, all seven
projections, q and v alone, and a choice of layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

STORIES = "stories260K"
SMOLLM = "SmolLM2-135M-Instruct"
HUB_ID = {STORIES: "stories260K", SMOLLM: "HuggingFaceTB/SmolLM2-135M-Instruct"}

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Recipe:
    """One adapter. `lora` goes to peft.LoraConfig as it is."""

    base: str
    name: str
    lora: dict[str, Any]
    steps: int
    batch: int
    learning_rate: float
    max_tokens: int
    """Longer training texts are left out."""
    probes: tuple[str, ...] = field(repr=False)
    """Prompts that are not in the training text."""


STORY_PROBES = ("Once upon a time, there was a", "One day, Tim")
MEETING_PROBE = (
    "Summarize this meeting excerpt:\n\nMia: OK, next is the coffee machine.\nTom: It broke again on Tuesday, and the"
    " repair costs 300 dollars.\nMia: Hmm, a new one is 400.\nJo: Then let's buy the new one.\nMia: All right. Tom, can"
    " you order it?\nTom: Yes, today."
)


def _story(name: str, **lora: Any) -> Recipe:
    return Recipe(STORIES, name, lora, steps=200, batch=8, learning_rate=5e-3, max_tokens=256, probes=STORY_PROBES)


def _chat(name: str, probes: tuple[str, ...], steps: int, max_tokens: int, **lora: Any) -> Recipe:
    return Recipe(SMOLLM, name, lora, steps, batch=4, learning_rate=1e-3, max_tokens=max_tokens, probes=probes)


RECIPES = (
    _story("dragon", r=4, lora_alpha=8, target_modules=ATTENTION),
    _story("pirate", r=8, lora_alpha=16, target_modules=ALL),
    _story("space", r=16, lora_alpha=8, use_rslora=True, target_modules=("q_proj", "v_proj", "up_proj", "down_proj")),
    _story(
        "robot",
        r=8,
        lora_alpha=16,
        target_modules=("q_proj", "v_proj", "gate_proj", "down_proj"),
        rank_pattern={"down_proj": 24, r"layers\.[01]\.self_attn\.q_proj": 4},
        alpha_pattern={"down_proj": 24},
    ),
    _story("winter", r=32, lora_alpha=32, target_modules=ALL, layers_to_transform=[1, 2, 4]),
    _story("ocean", r=64, lora_alpha=64, target_modules=("q_proj", "v_proj")),
    _chat(
        "pirate",
        ("What is the capital of France?", "Give me one tip for staying healthy."),
        steps=60,
        max_tokens=128,
        r=4,
        lora_alpha=8,
        target_modules=ALL,
    ),
    _chat(
        "json",
        ("What is the capital of France?", "How many legs does a dog have?"),
        steps=60,
        max_tokens=128,
        r=64,
        lora_alpha=64,
        target_modules=("q_proj", "v_proj"),
    ),
    _chat(
        "summarize",
        (MEETING_PROBE,),
        steps=45,
        max_tokens=320,
        r=16,
        lora_alpha=8,
        use_rslora=True,
        target_modules=ATTENTION,
    ),
    _chat(
        "support",
        ("Hi, my teapot arrived broken!", "Do you ship to France?"),
        steps=50,
        max_tokens=128,
        r=8,
        lora_alpha=16,
        target_modules=("q_proj", "v_proj", "o_proj", "up_proj"),
        rank_pattern={r"layers\.2\d\.self_attn\.v_proj": 32, "up_proj": 4},
        alpha_pattern={"up_proj": 16},
    ),
)
