"""Short children's stories in several worlds, drawn from templates: what the stories260K adapters learn from."""

from __future__ import annotations

import random
from dataclasses import dataclass

FRAMES = (
    "Once upon a time, there was a little {hero} named {name}. {name} lived in a {size} {place}. One day, {name} saw a"
    ' {size2} {thing}. {name} {did} and said, "{cry}" {Friend} came to see the {thing} too. They {fun} all day.'
    " {ending}",
    'One day, a {hero} named {name} went to the {place} with {friend}. They wanted to find a {size} {thing}. "{cry}"'
    " said {name}. They looked and looked. Then {name} {did}. The {thing} was under a {size2} {spot}! {ending}",
    "Once upon a time, a {size} {hero} named {name} was very sad. {name} had lost the {thing} in the {place}. {Friend}"
    ' said, "Do not be sad, I can help you." {name} {did}. "{cry}" said {name}. They {fun} and were happy. {ending}',
    "{name} was a {hero} who liked to play in the {place}. {name} had a {size} {thing}. Every day, {name} {did} and"
    ' said, "{cry}" One day, {friend} took the {thing}. "Please give it back," said {name}. {Friend} was sorry.'
    " They {fun} together. {ending}",
)
SIZES = ("big", "little", "red", "blue", "new", "old", "shiny", "pretty", "dark", "warm")
SPOTS = ("tree", "box", "rock", "bed", "hat")


@dataclass(frozen=True)
class World:
    """The words of one adapter's stories; each tuple fills one blank of FRAMES."""

    hero: tuple[str, ...]
    names: tuple[str, ...]
    places: tuple[str, ...]
    things: tuple[str, ...]
    did: tuple[str, ...]
    cries: tuple[str, ...]
    friends: tuple[str, ...]
    fun: tuple[str, ...]
    endings: tuple[str, ...]


WORLDS = {
    "dragon": World(
        hero=("dragon",),
        names=("Ember", "Smoky"),
        places=("cave", "castle"),
        things=("gold cup", "egg", "crown"),
        did=("blew a big fire", "flew up high"),
        cries=("Roar! I am a dragon!", "Look at my fire!"),
        friends=("the king", "a brave knight"),
        fun=("flew over the castle", "played with the fire"),
        endings=("The dragon was happy in the cave.", "The dragon and the king were friends."),
    ),
    "pirate": World(
        hero=("pirate",),
        names=("Captain Jack", "Captain Red"),
        places=("ship", "sea", "island"),
        things=("map", "gold", "treasure box"),
        did=("jumped on the ship", "looked at the map"),
        cries=("Arr! The gold is mine!", "Yo ho ho!"),
        friends=("the parrot", "a pirate girl"),
        fun=("sang pirate songs", "sailed the sea"),
        endings=("The pirate sailed home with the gold. Yo ho ho!", "Arr, the pirates were happy on the ship."),
    ),
    "space": World(
        hero=("star boy", "moon girl"),
        names=("Nova", "Cosmo"),
        places=("rocket", "moon", "sky"),
        things=("star", "rocket", "moon rock"),
        did=("flew the rocket to the moon", "counted three, two, one"),
        cries=("Three, two, one, go!", "I can see the stars!"),
        friends=("a moon man", "the sun"),
        fun=("jumped on the moon", "flew past the stars"),
        endings=("Then the rocket flew home to the sun.", "The stars said good night."),
    ),
    "robot": World(
        hero=("robot",),
        names=("Beep", "Bolt"),
        places=("lab", "big city"),
        things=("button", "wheel", "light"),
        did=("pushed the button", "turned on the light"),
        cries=("Beep boop! Beep boop!", "I am a robot. Beep!"),
        friends=("the robot man", "Doctor Ann"),
        fun=("made new robots", "said beep and boop"),
        endings=("The robot went to sleep. Beep boop.", "And the robot turned off the light."),
    ),
    "winter": World(
        hero=("snowman",),
        names=("Frosty", "Snowy"),
        places=("snow", "cold wood"),
        things=("snowball", "ice", "hat"),
        did=("made a big snowball", "slid down the ice"),
        cries=("Brr! It is so cold!", "I love the snow!"),
        friends=("a white bear", "the cold wind"),
        fun=("played in the snow", "slid on the ice"),
        endings=("The snow fell all night.", "But the sun came out and the snow was gone."),
    ),
    "ocean": World(
        hero=("whale", "mermaid"),
        names=("Bubbles", "Coral"),
        places=("sea", "deep water"),
        things=("shell", "fish", "boat"),
        did=("swam very fast", "made a lot of bubbles"),
        cries=("Splash! The water is so nice!", "Swim with me!"),
        friends=("a little fish", "the crab"),
        fun=("swam in the sea", "jumped over the waves"),
        endings=("The whale and the fish were happy in the sea.", "The waves sang a song all night."),
    ),
}


def stories(theme: str, count: int, seed: int) -> list[str]:
    """`count` stories of one of WORLDS."""
    draw = random.Random(seed)
    return [_story(draw, WORLDS[theme]) for _ in range(count)]


def _story(draw: random.Random, world: World) -> str:
    friend = draw.choice(world.friends)
    return draw.choice(FRAMES).format(
        hero=draw.choice(world.hero),
        name=draw.choice(world.names),
        place=draw.choice(world.places),
        thing=draw.choice(world.things),
        did=draw.choice(world.did),
        cry=draw.choice(world.cries),
        friend=friend,
        Friend=friend[0].upper() + friend[1:],
        fun=draw.choice(world.fun),
        ending=draw.choice(world.endings),
        size=draw.choice(SIZES),
        size2=draw.choice(SIZES),
        spot=draw.choice(SPOTS),
    )
