"""Arithmetic word problems with worked steps, in the manner of GSM8K.

``word_problem(rng)`` draws one family from ``FAMILIES`` and returns ``(question, answer)``.  An answer has one to five
lines, each a sentence with exactly one equation, followed by ``The answer is \\boxed{N}.``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Problem = tuple[str, list[str], int | str]  # question, steps, result
Family = Callable[[random.Random], Problem]


# ---------------------------------------------------------------------------------------------------------------------
# Vocabulary
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Person:
    """A first name with its pronouns; formats as the name."""

    name: str
    sub: str  # he, she
    obj: str  # him, her
    pos: str  # his, her

    def __str__(self) -> str:
        return self.name

    @property
    def cap(self) -> str:
        return self.sub.capitalize()


@dataclass(frozen=True)
class Item:
    """A countable noun."""

    one: str
    many: str

    def n(self, count: int) -> str:
        """Return '1 apple' or '5 apples'."""
        return f"{count} {self.one if count == 1 else self.many}"


IRREGULAR = {
    "goldfish": "goldfish",
    "sheep": "sheep",
    "goose": "geese",
    "loaf": "loaves",
    "shelf": "shelves",
    "person": "people",
    "child": "children",
    "knife": "knives",
    "potato": "potatoes",
    "tomato": "tomatoes",
    "mango": "mangoes",
    "piece of candy": "pieces of candy",
    "box of crayons": "boxes of crayons",
    "bottle of juice": "bottles of juice",
    "loaf of bread": "loaves of bread",
    "bag of chips": "bags of chips",
    "jar of honey": "jars of honey",
    "glass of milk": "glasses of milk",
    "cup of tea": "cups of tea",
}


def noun(one: str) -> Item:
    """Build an item, spelling its plural."""
    if one in IRREGULAR:
        return Item(one, IRREGULAR[one])
    if one.endswith(("s", "x", "ch", "sh")):
        return Item(one, one + "es")
    if one.endswith("y") and one[-2] not in "aeiou":
        return Item(one, one[:-1] + "ies")
    return Item(one, one + "s")


def nouns(text: str) -> list[Item]:
    """Split a comma-separated list of singular nouns."""
    return [noun(word.strip()) for word in text.split(",")]


WOMEN = [
    "Anna",
    "Mary",
    "Lisa",
    "Sara",
    "Emma",
    "Olivia",
    "Mia",
    "Sophia",
    "Ava",
    "Lily",
    "Grace",
    "Chloe",
    "Julia",
    "Maria",
    "Rosa",
    "Elena",
    "Nina",
    "Tina",
    "Kate",
    "Jane",
    "Amy",
    "Betty",
    "Carla",
    "Diana",
    "Ella",
    "Fiona",
    "Gina",
    "Hannah",
    "Iris",
    "Jenny",
    "Kelly",
    "Laura",
    "Megan",
    "Nora",
    "Paula",
    "Rachel",
    "Susan",
    "Tanya",
    "Wendy",
    "Zoe",
    "Janet",
    "Natalia",
    "Leah",
    "Amina",
    "Priya",
]
MEN = [
    "Tom",
    "John",
    "James",
    "Mark",
    "Peter",
    "Paul",
    "David",
    "Daniel",
    "Michael",
    "Robert",
    "Ben",
    "Sam",
    "Jack",
    "Leo",
    "Max",
    "Adam",
    "Alan",
    "Brian",
    "Carl",
    "Dean",
    "Eric",
    "Frank",
    "George",
    "Henry",
    "Ivan",
    "Jason",
    "Kevin",
    "Liam",
    "Martin",
    "Nathan",
    "Oscar",
    "Philip",
    "Ryan",
    "Steven",
    "Tony",
    "Victor",
    "Walter",
    "Josh",
    "Ken",
    "Omar",
    "Hugo",
    "Luis",
    "Carlos",
    "Ahmed",
    "Raj",
]
PEOPLE = [Person(n, "she", "her", "her") for n in WOMEN] + [Person(n, "he", "him", "his") for n in MEN]

# Small things one can own, buy, give away, share.
THINGS = nouns(
    "apple, orange, pear, peach, plum, banana, lemon, mango, strawberry, cherry, melon, potato, tomato, carrot, onion, "
    "pepper, cookie, cupcake, muffin, donut, sandwich, cracker, lollipop, chocolate bar, piece of candy, pencil, pen, "
    "marker, crayon, eraser, ruler, notebook, book, comic book, magazine, postcard, sticker, stamp, coin, card, "
    "marble, bead, button, ribbon, balloon, toy car, toy train, doll, puzzle, ball, tennis ball, baseball card, "
    "shell, rock, seashell, feather, leaflet, poster, photo, picture, key, candle, cup, plate, spoon, fork, bowl, "
    "mug, bottle, jar, box, basket, bag, hat, cap, scarf, sock, shirt, flower, rose, tulip, daisy, plant, seed, "
    "paper clip, envelope, folder, notepad, bracelet, necklace, ring, keychain, battery, brick, tile, nail, screw, "
    "token, ticket, badge, paper plane, water bottle, egg"
)
# Things sold at a price, in a shop.
GOODS = nouns(
    "pen, notebook, book, comic book, puzzle, doll, toy car, ball, hat, cap, scarf, shirt, mug, plate, bowl, candle, "
    "lamp, bag, basket, poster, plant, sandwich, pizza, cake, pie, bottle of juice, loaf of bread, bag of chips, "
    "jar of honey, box of crayons, bracelet, necklace, umbrella, towel, pillow, belt, wallet, ticket, card game, melon"
)
DEAR = nouns(
    "jacket, coat, bike, dress, camera, phone, table, chair, desk, tent, watch, guitar, suit, printer, scooter"
)
BAKED = nouns("cookie, cupcake, muffin, pie, donut, brownie, pancake, roll, bun, tart, cake, waffle")
ANIMALS = nouns("cow, sheep, goat, pig, horse, chicken, duck, goose, rabbit, turkey")
TWO_LEGS = nouns("chicken, duck, goose, turkey")
FOUR_LEGS = nouns("cow, sheep, goat, pig, horse")
TREES = nouns("apple tree, pear tree, plum tree, cherry tree, lemon tree, peach tree")
HOLDERS = nouns("box, bag, basket, tray, crate, pack, carton")
MADE = nouns("toy, chair, lamp, shirt, bottle, car part, shoe box, phone case, bicycle wheel, brick, tile, cup")
JOBS = ["waiter", "gardener", "tutor", "painter", "plumber", "driver", "cook", "cleaner", "clerk", "carpenter", "nurse"]
PLACES = ["park", "school", "library", "museum", "beach", "zoo", "market", "station", "farm", "lake", "stadium"]
SHOPS = ["store", "shop", "market", "mall", "corner shop", "supermarket"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
GROUPS = ["friends", "children", "students", "cousins", "classmates", "neighbors"]
TIMES_WORD = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}
FRACTIONS = {2: "half", 3: "one third", 4: "one quarter", 5: "one fifth"}


# ---------------------------------------------------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------------------------------------------------


def one_person(r: random.Random) -> Person:
    return r.choice(PEOPLE)


def two_people(r: random.Random) -> tuple[Person, Person]:
    a, b = r.sample(PEOPLE, 2)
    return a, b


def three_people(r: random.Random) -> tuple[Person, Person, Person]:
    a, b, c = r.sample(PEOPLE, 3)
    return a, b, c


def two_days(r: random.Random) -> tuple[str, str]:
    i = r.randrange(6)
    return DAYS[i], DAYS[i + 1]


def article(word: str) -> str:
    """Return the word with 'a' or 'an' before it."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def unit(count: int, word: str) -> str:
    """Return '1 hour' or '3 hours'."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def cents(amount: int) -> str:
    """Write an amount of cents in dollars: '$2.50', '$3'."""
    return f"${amount // 100}.{amount % 100:02d}" if amount % 100 else f"${amount // 100}"


def percent_pair(r: random.Random, most: int = 20) -> tuple[int, int]:
    """Draw (percentage, whole) such that the part is an integer."""
    percent, step = r.choice([(10, 10), (20, 5), (25, 4), (50, 2), (30, 10), (40, 5), (75, 4)])
    return percent, step * r.randint(2, most)


# ---------------------------------------------------------------------------------------------------------------------
# Bare sums
# ---------------------------------------------------------------------------------------------------------------------


def bare_two(r: random.Random) -> Problem:
    op = r.choice("+-*/")
    a, b = r.randint(2, 200), r.randint(2, 200)
    if op == "+":
        value = a + b
    elif op == "-":
        a += b
        value = a - b
    elif op == "*":
        a, b = r.randint(2, 60), r.randint(2, 12)
        value = a * b
    else:
        b, value = r.randint(2, 12), r.randint(2, 40)
        a = b * value
    ask = r.choice([f"What is {a} {op} {b}?", f"Calculate {a} {op} {b}.", f"How much is {a} {op} {b}?"])
    return ask, [f"We have {a} {op} {b} = {value}."], value


def bare_mul_add(r: random.Random) -> Problem:
    a, b = r.randint(2, 30), r.randint(2, 12)
    minus = r.random() < 0.5
    c = r.randint(1, a * b - 1) if minus else r.randint(1, 99)
    op, value = ("-", a * b - c) if minus else ("+", a * b + c)
    ask = r.choice([f"What is {a} * {b} {op} {c}?", f"Calculate {a} * {b} {op} {c}."])
    return ask, [f"First, {a} * {b} = {a * b}.", f"Then, {a * b} {op} {c} = {value}."], value


def bare_three(r: random.Random) -> Problem:
    a, b = r.randint(5, 200), r.randint(5, 200)
    c = r.randint(1, a + b - 1)
    ask = r.choice([f"What is {a} + {b} - {c}?", f"Calculate {a} + {b} - {c}."])
    return ask, [f"First, {a} + {b} = {a + b}.", f"Then, {a + b} - {c} = {a + b - c}."], a + b - c


def bare_brackets(r: random.Random) -> Problem:
    a, b, c = r.randint(2, 30), r.randint(2, 30), r.randint(2, 12)
    ask = r.choice([f"What is ({a} + {b}) * {c}?", f"Calculate ({a} + {b}) * {c}."])
    return ask, [f"First, {a} + {b} = {a + b}.", f"Then, {a + b} * {c} = {(a + b) * c}."], (a + b) * c


def bare_percent(r: random.Random) -> Problem:
    percent, whole = percent_pair(r, 60)
    part = whole * percent // 100
    return f"What is {percent}% of {whole}?", [f"We have {whole} * {percent} / 100 = {part}."], part


# ---------------------------------------------------------------------------------------------------------------------
# Getting, giving, removing
# ---------------------------------------------------------------------------------------------------------------------


def gain(r: random.Random) -> Problem:
    p, q = two_people(r)
    it = r.choice(THINGS)
    a, b = r.randint(2, 150), r.randint(2, 99)
    s = r.choice(
        [
            (f"{p.cap} buys {b} more at the {r.choice(SHOPS)}.", f"{p} buys {b} more"),
            (f"{q} gives {p.obj} {b} more.", f"{p} gets {b} more"),
            (f"Then {p.sub} finds {b} more.", f"{p} finds {b} more"),
        ]
    )
    ask = r.choice([f"How many {it.many} does {p} have now?", f"How many {it.many} does {p.sub} have in total?"])
    return f"{p} has {it.n(a)}. {s[0]} {ask}", [f"{s[1]}, so {p.sub} has {a} + {b} = {it.n(a + b)}."], a + b


def loss(r: random.Random) -> Problem:
    p, q = two_people(r)
    it = r.choice(THINGS)
    b, left = r.randint(2, 99), r.randint(1, 120)
    a = b + left
    s = r.choice([f"{p.cap} gives {b} of them to {q}.", f"{p.cap} loses {b} of them.", f"{p.cap} sells {b} of them."])
    ask = r.choice([f"How many {it.many} does {p} have left?", f"How many {it.many} are left?"])
    return f"{p} has {it.n(a)}. {s} {ask}", [f"{p} has {a} - {b} = {it.n(left)} left."], left


def several_removals(r: random.Random) -> Problem:
    p, q, s = three_people(r)
    it = r.choice(THINGS)
    b, c, left = r.randint(2, 40), r.randint(2, 40), r.randint(1, 60)
    a = b + c + left
    start = r.choice([f"{p} has {it.n(a)}.", f"{p} starts the day with {it.n(a)}."])
    text = f"{start} {p.cap} gives {b} to {q} and {c} to {s}. How many {it.many} does {p} have left?"
    steps = [f"{p} gives away {b} + {c} = {it.n(b + c)}.", f"So {p} has {a} - {b + c} = {it.n(left)} left."]
    return text, steps, left


def gain_then_loss(r: random.Random) -> Problem:
    p, q = two_people(r)
    it = r.choice(THINGS)
    a, b = r.randint(5, 90), r.randint(5, 60)
    c = r.randint(2, a + b - 1)
    first = r.choice([f"{p.cap} buys {b} more.", f"{p.cap} gets {b} more from {p.pos} mother."])
    then = r.choice([f"Then {p.sub} gives {c} to {q}.", f"Then {p.sub} loses {c} of them."])
    text = f"{p} had {it.n(a)}. {first} {then} How many {it.many} does {p} have now?"
    steps = [f"First, {p} has {a} + {b} = {it.n(a + b)}.", f"So {p} has {a + b} - {c} = {it.n(a + b - c)} left."]
    return text, steps, a + b - c


def half_then_some(r: random.Random) -> Problem:
    p, q = two_people(r)
    it = r.choice(THINGS)
    k = r.choice([2, 2, 3, 4])
    part = r.randint(4, 40)
    a = k * part
    rest = a - part
    c = r.randint(1, rest - 1)
    text = (
        f"{p} has {it.n(a)}. {p.cap} gives {FRACTIONS[k]} of them to {q}. Then {p.sub} "
        f"{r.choice(['loses', 'sells', 'throws away'])} {c} more. How many {it.many} does {p} have left?"
    )
    steps = [
        f"{p} gives {q} {a} / {k} = {it.n(part)}.",
        f"Then {p} has {a} - {part} = {it.n(rest)} left.",
        f"So {p} has {rest} - {c} = {it.n(rest - c)} left.",
    ]
    return text, steps, rest - c


def work_backwards(r: random.Random) -> Problem:
    p, q = two_people(r)
    it = r.choice(THINGS)
    given, bought, start = r.randint(2, 40), r.randint(2, 40), r.randint(41, 120)
    end = start - given + bought
    text = (
        f"{p} had some {it.many}. {p.cap} gave {given} to {q} and then bought {bought} more. "
        f"Now {p.sub} has {it.n(end)}. How many {it.many} did {p} {r.choice(['start with', 'have at first'])}?"
    )
    steps = [
        f"Before buying more, {p} had {end} - {bought} = {it.n(end - bought)}.",
        f"So {p} started with {end - bought} + {given} = {it.n(start)}.",
    ]
    return text, steps, start


def backwards_half(r: random.Random) -> Problem:
    p = one_person(r)
    spent, left = r.randint(2, 40), r.randint(2, 60)
    half = spent + left
    text = (
        f"{p} spent half of {p.pos} money on {article(r.choice(GOODS).one)}. Then {p.sub} spent ${spent} on lunch. "
        f"Now {p.sub} has ${left} left. How much money did {p} have at first?"
    )
    steps = [
        f"Before lunch, {p} had ${left} + ${spent} = ${half}.",
        f"So {p} started with ${half} * 2 = ${half * 2}.",
    ]
    return text, steps, half * 2


def bus_passengers(r: random.Random) -> Problem:
    off, on, left = r.randint(2, 15), r.randint(2, 15), r.randint(2, 30)
    a = off + left
    kind = r.choice(["bus", "train", "boat"])
    text = (
        f"There are {a} people on a {kind}. At the first stop, {off} people get off and {on} people get on. "
        f"How many people are on the {kind} now?"
    )
    steps = [
        f"After {off} people get off, there are {a} - {off} = {left} people left.",
        f"Then {on} people get on, so there are {left} + {on} = {left + on} people.",
    ]
    return text, steps, left + on


# ---------------------------------------------------------------------------------------------------------------------
# Comparing people
# ---------------------------------------------------------------------------------------------------------------------


def times_as_many(r: random.Random) -> Problem:
    p, q = two_people(r)
    it = r.choice(THINGS)
    a, k = r.randint(3, 60), r.randint(2, 5)
    text = f"{p} has {it.n(a)}. {q} has {TIMES_WORD[k]} as many {it.many} as {p}."
    first = f"{q} has {a} * {k} = {it.n(a * k)}."
    if r.random() < 0.5:
        ask = r.choice(["do they have in total", "do they have together", "do they have altogether"])
        steps = [first, f"In total, they have {a} + {a * k} = {it.n(a + a * k)}."]
        return f"{text} How many {it.many} {ask}?", steps, a + a * k
    steps = [first, f"So {q} has {a * k} - {a} = {a * k - a} more than {p}."]
    return f"{text} How many more {it.many} does {q} have than {p}?", steps, a * k - a


def more_than(r: random.Random) -> Problem:
    p, q = two_people(r)
    it = r.choice(THINGS)
    a, d = r.randint(3, 90), r.randint(2, 50)
    text = (
        f"{p} has {it.n(a)}. {q} has {d} more {it.many} than {p}. "
        f"How many {it.many} do they have {r.choice(['in total', 'together', 'altogether'])}?"
    )
    steps = [f"{q} has {a} + {d} = {it.n(a + d)}.", f"In total, they have {a} + {a + d} = {it.n(2 * a + d)}."]
    return text, steps, 2 * a + d


def fewer_than(r: random.Random) -> Problem:
    p, q = two_people(r)
    it = r.choice(THINGS)
    b, d = r.randint(2, 60), r.randint(2, 40)
    a = b + d
    verb, did = r.choice([("has", "have"), ("collected", "collect"), ("found", "find")])
    aux = "do" if did == "have" else "did"
    text = (
        f"{p} {verb} {it.n(a)}. {q} {verb} {d} fewer {it.many} than {p}. "
        f"How many {it.many} {aux} they {did} {r.choice(['in total', 'altogether'])}?"
    )
    steps = [
        f"{q} {verb} {a} - {d} = {it.n(b)}.",
        f"In total, they {'have' if aux == 'do' else verb} {a} + {b} = {it.n(a + b)}.",
    ]
    return text, steps, a + b


def three_compare(r: random.Random) -> Problem:
    p, q, s = three_people(r)
    it = r.choice(THINGS)
    a, k, d = r.randint(3, 40), r.randint(2, 4), r.randint(2, 30)
    b = a * k
    c = b + d
    text = f"{p} has {it.n(a)}. {q} has {TIMES_WORD[k]} as many {it.many} as {p}. {s} has {d} more {it.many} than {q}. "
    steps = [f"{q} has {a} * {k} = {it.n(b)}.", f"{s} has {b} + {d} = {it.n(c)}."]
    if r.random() < 0.3:
        return text + f"How many {it.many} does {s} have?", steps, c
    steps.append(f"In total, they have {a} + {b} + {c} = {it.n(a + b + c)}.")
    return text + f"How many {it.many} do the three of them have in total?", steps, a + b + c


def half_as_many(r: random.Random) -> Problem:
    p, q, s = three_people(r)
    it = r.choice(THINGS)
    b = r.randint(3, 40)
    a, d = 2 * b, r.randint(1, b - 1)
    text = (
        f"{p} has {it.n(a)}. {q} has half as many {it.many} as {p}. {s} has {d} fewer {it.many} than {q}. "
        f"How many {it.many} does {s} have?"
    )
    return text, [f"{q} has {a} / 2 = {it.n(b)}.", f"So {s} has {b} - {d} = {it.n(b - d)}."], b - d


def ages_future(r: random.Random) -> Problem:
    p, q = two_people(r)
    a, d, n = r.randint(4, 40), r.randint(2, 25), r.randint(2, 15)
    older = r.random() < 0.5 or d >= a
    b, op, word = (a + d, "+", "older") if older else (a - d, "-", "younger")
    text = f"{p} is {a} years old. {q} is {unit(d, 'year')} {word} than {p}. How old will {q} be in {n} years?"
    steps = [
        f"{q} is {a} {op} {d} = {unit(b, 'year')} old.",
        f"In {n} years, {q} will be {b} + {n} = {b + n} years old.",
    ]
    return text, steps, b + n


def ages_times(r: random.Random) -> Problem:
    p, q = two_people(r)
    k, a = r.randint(2, 4), r.randint(4, 20)
    b = a * k
    text = f"{p} is {a} years old. {q} is {TIMES_WORD[k]} as old as {p}. "
    first = f"{q} is {a} * {k} = {b} years old."
    if r.random() < 0.5:
        return text + "What is the sum of their ages?", [first, f"In total, their ages are {a} + {b} = {a + b}."], a + b
    n = r.randint(1, a - 1)
    steps = [first, f"{unit(n, 'year').capitalize()} ago, {q} was {b} - {n} = {unit(b - n, 'year')} old."]
    return text + f"How old was {q} {unit(n, 'year')} ago?", steps, b - n


def ages_parent(r: random.Random) -> Problem:
    p = one_person(r)
    parent = r.choice(["mother", "father", "aunt", "uncle"])
    a, k, n = r.randint(5, 15), r.randint(3, 4), r.randint(2, 10)
    b = a * k
    text = (
        f"{p} is {a} years old now. {p.pos.capitalize()} {parent} is {TIMES_WORD[k]} as old as {p.sub} is. "
        f"In {n} years, what will be the sum of their ages?"
    )
    steps = [
        f"The {parent} is {a} * {k} = {b} years old now.",
        f"In {n} years, {p} will be {a} + {n} = {a + n} years old.",
        f"In {n} years, the {parent} will be {b} + {n} = {b + n} years old.",
        f"In total, their ages will be {a + n} + {b + n} = {a + b + 2 * n}.",
    ]
    return text, steps, a + b + 2 * n


# ---------------------------------------------------------------------------------------------------------------------
# Buying, change, discounts
# ---------------------------------------------------------------------------------------------------------------------


def buy_one_kind(r: random.Random) -> Problem:
    p = one_person(r)
    it = r.choice(GOODS)
    n, c = r.randint(2, 15), r.randint(2, 25)
    text = r.choice(
        [
            f"{p} buys {it.n(n)} at the {r.choice(SHOPS)}. Each {it.one} costs ${c}. How much does {p} pay?",
            f"One {it.one} costs ${c}. {p} wants to buy {it.n(n)}. How much money does {p.sub} need?",
        ]
    )
    return text, [f"The {it.many} cost {n} * ${c} = ${n * c}."], n * c


def change(r: random.Random) -> Problem:
    p = one_person(r)
    it = r.choice(GOODS)
    n, c = r.randint(2, 9), r.randint(2, 10)
    cost = n * c
    pay = r.choice([x for x in (20, 50, 100, 100) if x > cost])
    text = r.choice(
        [
            f"{p} buys {it.n(n)} for ${c} each. {p.cap} pays with a ${pay} bill. How much change does {p} get?",
            f"{p} has ${pay}. {p.cap} buys {it.n(n)} that cost ${c} each. How much money does {p} have left?",
        ]
    )
    last = (
        f"So {p} gets ${pay} - ${cost} = ${pay - cost} back."
        if "change" in text
        else (f"So {p} has ${pay} - ${cost} = ${pay - cost} left.")
    )
    return text, [f"The {it.many} cost {n} * ${c} = ${cost}.", last], pay - cost


def two_kinds(r: random.Random) -> Problem:
    p = one_person(r)
    x, y = r.sample(GOODS, 2)
    n, c, m, d = r.randint(2, 9), r.randint(2, 15), r.randint(2, 9), r.randint(2, 15)
    text = (
        f"{p} buys {x.n(n)} and {y.n(m)}. Each {x.one} costs ${c} and each {y.one} costs ${d}. "
        f"{r.choice([f'How much does {p} spend in total?', f'How much money does {p.sub} pay in total?'])}"
    )
    steps = [
        f"The {x.many} cost {n} * ${c} = ${n * c}.",
        f"The {y.many} cost {m} * ${d} = ${m * d}.",
        f"In total, {p} pays ${n * c} + ${m * d} = ${n * c + m * d}.",
    ]
    return text, steps, n * c + m * d


def two_kinds_change(r: random.Random) -> Problem:
    p = one_person(r)
    x, y = r.sample(GOODS, 2)
    n, c, m, d = r.randint(2, 6), r.randint(2, 9), r.randint(2, 6), r.randint(2, 9)
    total = n * c + m * d
    have = total + r.randint(1, 60)
    text = (
        f"{p} goes to the {r.choice(SHOPS)} with ${have}. {p.cap} buys {x.n(n)} for ${c} each and {y.n(m)} for ${d} "
        f"each. How much money does {p} have left?"
    )
    steps = [
        f"The {x.many} cost {n} * ${c} = ${n * c}.",
        f"The {y.many} cost {m} * ${d} = ${m * d}.",
        f"In total, {p} pays ${n * c} + ${m * d} = ${total}.",
        f"So {p} has ${have} - ${total} = ${have - total} left.",
    ]
    return text, steps, have - total


def three_items(r: random.Random) -> Problem:
    p = one_person(r)
    x, y, z = r.sample(GOODS, 3)
    a, k, d = r.randint(3, 30), r.randint(2, 4), r.randint(2, 15)
    b = a * k
    c = b + d
    text = (
        f"{p} buys {article(x.one)} for ${a}. {p.cap} also buys {article(y.one)} that costs {TIMES_WORD[k]} as much as "
        f"the {x.one}, and {article(z.one)} that costs ${d} more than the {y.one}. How much does {p} pay in total?"
    )
    steps = [
        f"The {y.one} costs ${a} * {k} = ${b}.",
        f"The {z.one} costs ${b} + ${d} = ${c}.",
        f"In total, {p} pays ${a} + ${b} + ${c} = ${a + b + c}.",
    ]
    return text, steps, a + b + c


def unit_price(r: random.Random) -> Problem:
    p = one_person(r)
    it = r.choice(GOODS)
    n, c, m = r.randint(2, 9), r.randint(2, 20), r.randint(2, 15)
    text = r.choice(
        [
            f"{p} pays ${n * c} for {it.n(n)}. At the same price, how much do {it.n(m)} cost?",
            f"At the {r.choice(SHOPS)}, {it.n(n)} cost ${n * c}. {p} wants {it.n(m)}. How much will {p.sub} pay?",
        ]
    )
    steps = [f"Each {it.one} costs ${n * c} / {n} = ${c}.", f"So {it.n(m)} cost {m} * ${c} = ${m * c}."]
    return text, steps, m * c


def how_many_can_buy(r: random.Random) -> Problem:
    p = one_person(r)
    it, other = r.sample(GOODS, 2)
    c, n, spent = r.randint(2, 12), r.randint(2, 20), r.randint(2, 30)
    have = c * n + spent
    text = (
        f"{p} has ${have}. {p.cap} spends ${spent} on {article(other.one)}. "
        f"With the rest {p.sub} buys {it.many} that cost ${c} each. How many {it.many} can {p} buy?"
    )
    steps = [f"{p} has ${have} - ${spent} = ${c * n} left.", f"So {p} can buy ${c * n} / ${c} = {it.n(n)}."]
    return text, steps, n


def discount(r: random.Random) -> Problem:
    p = one_person(r)
    it = r.choice(DEAR)
    percent, price = percent_pair(r, 25)
    off = price * percent // 100
    text = r.choice(
        [
            (
                f"{article(it.one).capitalize()} costs ${price}. The {r.choice(SHOPS)} gives a {percent}% discount. "
                f"How much does {p} pay for the {it.one}?"
            ),
            (
                f"{p} wants to buy {article(it.one)} that costs ${price}. It is on sale for {percent}% off. "
                f"What is the sale price of the {it.one}?"
            ),
        ]
    )
    steps = [
        f"The discount is ${price} * {percent} / 100 = ${off}.",
        f"So the {it.one} costs ${price} - ${off} = ${price - off}.",
    ]
    return text, steps, price - off


def discount_many(r: random.Random) -> Problem:
    p = one_person(r)
    it = r.choice(GOODS)
    percent, price = percent_pair(r, 6)
    n = r.randint(2, 8)
    off = price * percent // 100
    new = price - off
    text = (
        f"{p} buys {it.n(n)}. The usual price of each {it.one} is ${price}, but today there is a {percent}% discount. "
        f"How much does {p} pay in total?"
    )
    steps = [
        f"The discount on each {it.one} is ${price} * {percent} / 100 = ${off}.",
        f"So each {it.one} costs ${price} - ${off} = ${new}.",
        f"In total, {p} pays {n} * ${new} = ${n * new}.",
    ]
    return text, steps, n * new


def price_rise(r: random.Random) -> Problem:
    it = r.choice(DEAR)
    percent, price = percent_pair(r, 25)
    up = price * percent // 100
    word = r.choice(["goes up by", "rises by", "increases by"])
    text = f"The price of {article(it.one)} was ${price}. The price {word} {percent}%. What is the new price?"
    steps = [
        f"The price {word} ${price} * {percent} / 100 = ${up}.",
        f"So the new price is ${price} + ${up} = ${price + up}.",
    ]
    return text, steps, price + up


def price_cents(r: random.Random) -> Problem:
    p = one_person(r)
    it = r.choice(THINGS)
    c, n = r.choice([25, 50, 75, 125, 150, 175, 225, 250, 350, 450]), r.randint(2, 12)
    text = f"{p} buys {it.n(n)}. Each {it.one} costs {cents(c)}. How much does {p} pay in total?"
    return text, [f"In total, {p} pays {n} * {cents(c)} = {cents(n * c)}."], cents(n * c)[1:]


def tip(r: random.Random) -> Problem:
    p, q = two_people(r)
    a, b = 10 * r.randint(1, 6), 10 * r.randint(1, 6)
    percent = r.choice([10, 20])
    bill = a + b
    t = bill * percent // 100
    text = (
        f"{p} and {q} eat at a restaurant. {p}'s meal costs ${a} and {q}'s meal costs ${b}. "
        f"They leave a {percent}% tip. How much do they pay in total?"
    )
    steps = [
        f"The meals cost ${a} + ${b} = ${bill}.",
        f"The tip is ${bill} * {percent} / 100 = ${t}.",
        f"In total, they pay ${bill} + ${t} = ${bill + t}.",
    ]
    return text, steps, bill + t


# ---------------------------------------------------------------------------------------------------------------------
# Earning, saving, profit
# ---------------------------------------------------------------------------------------------------------------------


def earn_week(r: random.Random) -> Problem:
    p = one_person(r)
    w, h, d = r.randint(8, 25), r.randint(2, 8), r.randint(2, 6)
    job = article(r.choice(JOBS))
    text = (
        f"{p} works as {job} and earns ${w} an hour. {p.cap} works {h} hours a day, {d} days a week. "
        f"{r.choice([f'How much does {p} earn in a week?', f'How much money does {p.sub} make each week?'])}"
    )
    steps = [
        f"{p} works {h} * {d} = {h * d} hours a week.",
        f"So {p} earns {h * d} * ${w} = ${h * d * w} a week.",
    ]
    return text, steps, h * d * w


def earn_two_jobs(r: random.Random) -> Problem:
    p = one_person(r)
    j, k = r.sample(JOBS, 2)
    w, v, h, g = r.randint(8, 25), r.randint(8, 25), r.randint(2, 20), r.randint(2, 20)
    text = (
        f"{p} has two jobs. {p.cap} earns ${w} an hour as {article(j)} and ${v} an hour as {article(k)}. "
        f"This week {p.sub} worked {h} hours as {article(j)} and {g} hours as {article(k)}. "
        f"How much did {p} earn in total?"
    )
    steps = [
        f"As {article(j)}, {p} earned {h} * ${w} = ${h * w}.",
        f"As {article(k)}, {p} earned {g} * ${v} = ${g * v}.",
        f"In total, {p} earned ${h * w} + ${g * v} = ${h * w + g * v}.",
    ]
    return text, steps, h * w + g * v


def overtime(r: random.Random) -> Problem:
    p = one_person(r)
    w, h, e, x = r.randint(8, 20), r.choice([20, 30, 40]), r.randint(2, 10), r.randint(2, 8)
    text = (
        f"{p} earns ${w} an hour. If {p.sub} works more than {h} hours in a week, each extra hour pays ${x} more. "
        f"This week {p} works {h + e} hours. How much does {p} earn this week?"
    )
    steps = [
        f"For the first {h} hours, {p} earns {h} * ${w} = ${h * w}.",
        f"{p} works {h + e} - {h} = {e} extra hours.",
        f"Each extra hour pays ${w} + ${x} = ${w + x}.",
        f"For the extra hours, {p} earns {e} * ${w + x} = ${e * (w + x)}.",
        f"In total, {p} earns ${h * w} + ${e * (w + x)} = ${h * w + e * (w + x)}.",
    ]
    return text, steps, h * w + e * (w + x)


def save_weeks(r: random.Random) -> Problem:
    p = one_person(r)
    it = r.choice(DEAR)
    s, weeks, have = r.randint(3, 25), r.randint(2, 20), r.randint(5, 80)
    cost = have + s * weeks
    text = (
        f"{p} wants to buy {article(it.one)} that costs ${cost}. {p.cap} already has ${have} and saves ${s} each week. "
        f"How many weeks will it take {p} to save enough money?"
    )
    steps = [f"{p} needs ${cost} - ${have} = ${s * weeks} more.", f"So it takes ${s * weeks} / ${s} = {weeks} weeks."]
    return text, steps, weeks


def save_and_spend(r: random.Random) -> Problem:
    p = one_person(r)
    e, n = r.randint(10, 60), r.randint(2, 12)
    x = r.randint(2, e - 2)
    when = r.choice(["week", "day", "month"])
    text = (
        f"{p} gets ${e} every {when}. {p.cap} spends ${x} of it every {when} and saves the rest. "
        f"How much money will {p} save in {n} {when}s?"
    )
    steps = [
        f"Each {when}, {p} saves ${e} - ${x} = ${e - x}.",
        f"In {n} {when}s, {p} saves {n} * ${e - x} = ${n * (e - x)}.",
    ]
    return text, steps, n * (e - x)


def chores(r: random.Random) -> Problem:
    p = one_person(r)
    a, b, n, m = r.randint(2, 12), r.randint(2, 12), r.randint(2, 9), r.randint(2, 9)
    x, y = r.sample(["lawn", "car", "window", "garden", "room"], 2)
    do = {"lawn": "mow", "car": "wash", "window": "clean", "garden": "weed", "room": "paint"}
    ing = {"mow": "mowing", "wash": "washing", "clean": "cleaning", "weed": "weeding", "paint": "painting"}
    gx, gy = ing[do[x]], ing[do[y]]
    text = (
        f"{p} earns money by {gx} {x}s and {gy} {y}s. {p.cap} gets ${a} for each {x} and ${b} for each {y}. "
        f"How much does {p} earn for {n} {x}s and {m} {y}s?"
    )
    steps = [
        f"For the {x}s, {p} earns {n} * ${a} = ${n * a}.",
        f"For the {y}s, {p} earns {m} * ${b} = ${m * b}.",
        f"In total, {p} earns ${n * a} + ${m * b} = ${n * a + m * b}.",
    ]
    return text, steps, n * a + m * b


def profit(r: random.Random) -> Problem:
    p = one_person(r)
    it = r.choice(GOODS)
    n, buy, gain_each = r.randint(3, 30), r.randint(2, 12), r.randint(1, 12)
    sell = buy + gain_each
    text = (
        f"{p} buys {it.n(n)} for ${buy} each. {p.cap} sells all of them for ${sell} each. "
        f"{r.choice([f'How much profit does {p} make?', f'What is {p.pos} profit?'])}"
    )
    steps = [
        f"The {it.many} cost {n} * ${buy} = ${n * buy}.",
        f"{p} sells them for {n} * ${sell} = ${n * sell}.",
        f"So the profit is ${n * sell} - ${n * buy} = ${n * gain_each}.",
    ]
    return text, steps, n * gain_each


def stand_profit(r: random.Random) -> Problem:
    p = one_person(r)
    drink = r.choice(["lemonade", "orange juice", "iced tea", "hot chocolate"])
    n, c = r.randint(10, 60), r.randint(2, 5)
    a, b = r.randint(2, n // 2), r.randint(2, n // 2)
    rev = n * c
    text = (
        f"{p} sells {drink} for ${c} a cup. {p.cap} pays ${a} for cups and ${b} for the other supplies. "
        f"If {p.sub} sells {n} cups, how much profit does {p} make?"
    )
    steps = [
        f"{p} earns {n} * ${c} = ${rev}.",
        f"The supplies cost ${a} + ${b} = ${a + b}.",
        f"So the profit is ${rev} - ${a + b} = ${rev - a - b}.",
    ]
    return text, steps, rev - a - b


def rent(r: random.Random) -> Problem:
    p = one_person(r)
    pay, frac = 100 * r.randint(5, 9), r.choice([2, 4, 5])
    part = pay // frac
    food = r.randint(20, pay - part - 20)
    left = pay - part - food
    text = (
        f"{p} earns ${pay} a month. {p.cap} spends {FRACTIONS[frac]} of it on rent and ${food} on food. "
        f"How much money does {p} have left each month?"
    )
    steps = [
        f"{p} spends ${pay} / {frac} = ${part} on rent.",
        f"In total, {p} spends ${part} + ${food} = ${part + food}.",
        f"So {p} has ${pay} - ${part + food} = ${left} left.",
    ]
    return text, steps, left


# ---------------------------------------------------------------------------------------------------------------------
# Groups and sharing
# ---------------------------------------------------------------------------------------------------------------------


def share(r: random.Random) -> Problem:
    p = one_person(r)
    it = r.choice(THINGS)
    n, k = r.randint(2, 12), r.randint(2, 20)
    group = r.choice(GROUPS)
    how = r.choice(["shares them equally among", "divides them equally among"])
    text = f"{p} has {it.n(n * k)}. {p.cap} {how} {n} {group}. How many {it.many} does each of the {group} get?"
    return text, [f"Each of the {group} gets {n * k} / {n} = {it.n(k)}."], k


def share_after(r: random.Random) -> Problem:
    p = one_person(r)
    it = r.choice(THINGS)
    n, k, kept = r.randint(2, 10), r.randint(2, 15), r.randint(2, 20)
    total = n * k + kept
    group = r.choice(GROUPS)
    text = (
        f"{p} has {it.n(total)}. {p.cap} keeps {kept} and shares the rest equally among {n} {group}. "
        f"How many {it.many} does each of the {group} get?"
    )
    steps = [
        f"After keeping {kept}, {p} has {total} - {kept} = {it.n(n * k)} left.",
        f"So each of the {group} gets {n * k} / {n} = {it.n(k)}.",
    ]
    return text, steps, k


def pool_share(r: random.Random) -> Problem:
    p, q, s = three_people(r)
    it = r.choice(THINGS)
    each = r.randint(5, 40)
    a = r.randint(2, each * 3 // 2)
    b = r.randint(1, each)
    c = 3 * each - a - b
    text = (
        f"{p} has {it.n(a)}, {q} has {it.n(b)}, and {s} has {it.n(c)}. They put them together and share them equally. "
        f"How many {it.many} does each of them get?"
    )
    steps = [
        f"In total, they have {a} + {b} + {c} = {it.n(3 * each)}.",
        f"So each of them gets {3 * each} / 3 = {it.n(each)}.",
    ]
    return text, steps, each


def containers(r: random.Random) -> Problem:
    p = one_person(r)
    it, box = r.choice(THINGS[:60]), r.choice(HOLDERS)
    n, k, extra = r.randint(2, 12), r.randint(3, 24), r.randint(2, 30)
    text = (
        f"{p} has {box.n(n)} with {it.n(k)} in each {box.one}. {p.cap} also has {extra} other {it.many}. "
        f"How many {it.many} does {p} have in total?"
    )
    steps = [
        f"The {box.many} hold {n} * {k} = {it.n(n * k)}.",
        f"In total, {p} has {n * k} + {extra} = {it.n(n * k + extra)}.",
    ]
    return text, steps, n * k + extra


def pack_up(r: random.Random) -> Problem:
    p = one_person(r)
    it, box = r.choice(THINGS[:60]), r.choice(HOLDERS)
    n, k, bad = r.randint(2, 20), r.randint(2, 15), r.randint(2, 20)
    total = n * k + bad
    text = (
        f"{p} has {it.n(total)}. {bad} of them are damaged and {p.sub} throws them away. {p.cap} puts the rest in "
        f"{box.many} of {k}. How many {box.many} does {p} fill?"
    )
    steps = [
        f"{p} has {total} - {bad} = {it.n(n * k)} left.",
        f"So {p} fills {n * k} / {k} = {box.n(n)}.",
    ]
    return text, steps, n


def seats(r: random.Random) -> Problem:
    rows, per = r.randint(3, 25), r.randint(4, 20)
    empty = r.randint(2, rows * per - 2)
    place = r.choice(["theater", "hall", "cinema", "classroom", "stadium section"])
    text = f"A {place} has {rows} rows with {per} seats in each row. {empty} seats are empty. How many seats are taken?"
    steps = [
        f"In total, there are {rows} * {per} = {rows * per} seats.",
        f"So {rows * per} - {empty} = {rows * per - empty} seats are taken.",
    ]
    return text, steps, rows * per - empty


def class_fraction(r: random.Random) -> Problem:
    k, part = r.randint(2, 5), r.randint(3, 12)
    total = k * part
    verb = r.choice(["walk to school", "play football", "wear glasses", "like music", "have a pet"])
    text = (
        f"There are {total} students in a class. {FRACTIONS[k].capitalize()} of them {verb}. "
        f"How many students do not {verb}?"
    )
    steps = [
        f"The number of students who {verb} is {total} / {k} = {part}.",
        f"So {total} - {part} = {total - part} students do not {verb}.",
    ]
    return text, steps, total - part


def class_percent(r: random.Random) -> Problem:
    percent, total = percent_pair(r, 20)
    girls = total * percent // 100
    place = r.choice(["school club", "choir", "summer camp", "sports team", "chess club"])
    x, y = r.choice([("girls", "boys"), ("boys", "girls")])
    text = f"A {place} has {total} members. {percent}% of them are {x} and the rest are {y}. How many {y} are there?"
    steps = [
        f"There are {total} * {percent} / 100 = {girls} {x}.",
        f"So there are {total} - {girls} = {total - girls} {y}.",
    ]
    return text, steps, total - girls


def two_fractions(r: random.Random) -> Problem:
    j, k = r.choice([(2, 3), (2, 4), (2, 5), (3, 4), (4, 5), (3, 5)])
    total = j * k * r.randint(2, 8)
    a, b = total // j, total // k
    p = one_person(r)
    x, y, z = r.sample(["red", "blue", "green", "yellow", "white", "black"], 3)
    it = r.choice(nouns("marble, bead, button, balloon, ball, sticker, card, tile"))
    text = (
        f"{p} has {it.n(total)}. {FRACTIONS[j].capitalize()} of them are {x}, {FRACTIONS[k]} of them are {y}, and the "
        f"rest are {z}. How many {it.many} are {z}?"
    )
    steps = [
        f"There are {total} / {j} = {a} {x} {it.many}.",
        f"There are {total} / {k} = {b} {y} {it.many}.",
        f"The {x} and {y} {it.many} are {a} + {b} = {it.n(a + b)}.",
        f"So {total} - {a + b} = {it.n(total - a - b)} are {z}.",
    ]
    return text, steps, total - a - b


def teams(r: random.Random) -> Problem:
    size, n = r.randint(2, 12), r.randint(2, 12)
    total = size * n
    boys = r.randint(2, total - 2)
    what = r.choice(["teams", "groups"])
    text = (
        f"There are {boys} boys and {total - boys} girls in a gym class. The teacher puts them in {what} of {size}. "
        f"How many {what} are there?"
    )
    steps = [
        f"In total, there are {boys} + {total - boys} = {total} children.",
        f"So there are {total} / {size} = {n} {what}.",
    ]
    return text, steps, n


# ---------------------------------------------------------------------------------------------------------------------
# Farms, baking, nature
# ---------------------------------------------------------------------------------------------------------------------


def eggs_sell(r: random.Random) -> Problem:
    p = one_person(r)
    broken, size, boxes, c = r.randint(2, 15), r.choice([6, 10, 12]), r.randint(2, 9), r.randint(2, 6)
    good = size * boxes
    found = good + broken
    text = (
        f"On {p}'s farm, {p.sub} {r.choice(['collects', 'finds', 'gathers'])} {found} eggs, but {broken} of them are "
        f"broken. {p.cap} packs the good eggs in cartons of {size} and gets ${c} for each carton. "
        f"How much money does {p} get?"
    )
    steps = [
        f"{p} has {found} - {broken} = {good} good eggs.",
        f"So {p} fills {good} / {size} = {boxes} cartons.",
        f"So {p} gets {boxes} * ${c} = ${boxes * c}.",
    ]
    return text, steps, boxes * c


def eggs_dozen(r: random.Random) -> Problem:
    p = one_person(r)
    dozens, days, c = r.randint(1, 5), r.choice([2, 3, 4, 6, 7]), r.randint(2, 6)
    hens, per = r.choice([(12 * dozens, 1), (6 * dozens, 2)])
    total = hens * per * days
    text = (
        f"{p} has {hens} hens. Each hen lays {unit(per, 'egg')} a day. {p.cap} sells the eggs for ${c} per dozen. "
        f"How much money does {p} make in {days} days?"
    )
    steps = [
        f"Each day, the hens lay {hens} * {per} = {hens * per} eggs.",
        f"In {days} days, the hens lay {hens * per} * {days} = {total} eggs.",
        f"{p} has {total} / 12 = {total // 12} dozen eggs.",
        f"So {p} makes {total // 12} * ${c} = ${total // 12 * c}.",
    ]
    return text, steps, total // 12 * c


def farm_legs(r: random.Random) -> Problem:
    x, y = r.choice(TWO_LEGS), r.choice(FOUR_LEGS)
    a, b = r.randint(2, 40), r.randint(2, 40)
    text = (
        f"A farmer has {x.n(a)} and {y.n(b)}. Each {x.one} has 2 legs and each {y.one} has 4 legs. "
        f"How many legs do the animals have in total?"
    )
    steps = [
        f"The {x.many} have {a} * 2 = {a * 2} legs.",
        f"The {y.many} have {b} * 4 = {b * 4} legs.",
        f"In total, the animals have {a * 2} + {b * 4} = {a * 2 + b * 4} legs.",
    ]
    return text, steps, a * 2 + b * 4


def farm_count(r: random.Random) -> Problem:
    x, y, z = r.sample(ANIMALS, 3)
    a, k = r.randint(4, 30), r.randint(2, 4)
    b = a * k
    d = r.randint(1, b - 1)
    c = b - d
    text = (
        f"A farm has {x.n(a)}. It has {TIMES_WORD[k]} as many {y.many} as {x.many}, and {d} fewer {z.many} than "
        f"{y.many}. How many animals are on the farm in total?"
    )
    steps = [
        f"The farm has {a} * {k} = {y.n(b)}.",
        f"The farm has {b} - {d} = {z.n(c)}.",
        f"In total, there are {a} + {b} + {c} = {a + b + c} animals.",
    ]
    return text, steps, a + b + c


def feed(r: random.Random) -> Problem:
    x = r.choice(ANIMALS)
    n, k, days = r.randint(3, 20), r.randint(2, 6), r.choice([2, 3, 5, 7])
    food = r.choice(["pounds of food", "cups of food", "kilograms of feed"])
    when = "a week" if days == 7 else f"{days} days"
    text = f"A farmer has {x.n(n)}. Each {x.one} eats {k} {food} a day. How many {food} do they eat in {when}?"
    steps = [
        f"Each day, the {x.many} eat {n} * {k} = {n * k} {food}.",
        f"In {days} days, they eat {n * k} * {days} = {n * k * days} {food}.",
    ]
    return text, steps, n * k * days


def orchard(r: random.Random) -> Problem:
    tree = r.choice(TREES)
    fruit = noun(tree.one.split()[0])
    n, m, k = r.randint(3, 15), r.randint(3, 12), r.randint(2, 8)
    trees = n * m
    text = (
        f"An orchard has {n} rows of {m} {tree.many}. Each tree gives {k} baskets of {fruit.many}. "
        f"How many baskets of {fruit.many} does the orchard give?"
    )
    steps = [
        f"In total, there are {n} * {m} = {tree.n(trees)}.",
        f"So the orchard gives {trees} * {k} = {trees * k} baskets of {fruit.many}.",
    ]
    return text, steps, trees * k


def bake_ingredients(r: random.Random) -> Problem:
    p = one_person(r)
    b = r.choice(BAKED)
    stuff = r.choice(["cups of flour", "eggs", "cups of sugar", "spoons of butter", "cups of milk"])
    per, cup, k = r.choice([6, 8, 10, 12, 20, 24]), r.randint(2, 6), r.randint(2, 9)
    text = (
        f"{p} needs {cup} {stuff} to make {b.n(per)}. {p.cap} wants to make {b.n(per * k)}. "
        f"How many {stuff} does {p} need?"
    )
    steps = [
        f"{p} needs to make {per * k} / {per} = {k} batches.",
        f"So {p} needs {k} * {cup} = {k * cup} {stuff}.",
    ]
    return text, steps, k * cup


def bake_left(r: random.Random) -> Problem:
    p = one_person(r)
    b = r.choice(BAKED)
    trays, per = r.randint(2, 9), r.choice([6, 8, 10, 12, 15])
    total = trays * per
    ate, sold = r.randint(2, total // 3), r.randint(2, total // 2)
    text = (
        f"{p} bakes {trays} trays of {b.many} with {b.n(per)} on each tray. {p.pos.capitalize()} family eats {ate} of "
        f"them and {p.sub} {r.choice(['sells', 'gives away'])} {sold} more. "
        f"How many {b.many} does {p} have left?"
    )
    steps = [
        f"{p} bakes {trays} * {per} = {b.n(total)}.",
        f"After eating, there are {total} - {ate} = {b.n(total - ate)} left.",
        f"So {p} has {total - ate} - {sold} = {b.n(total - ate - sold)} left.",
    ]
    return text, steps, total - ate - sold


def dozens(r: random.Random) -> Problem:
    p, q = two_people(r)
    b = r.choice(BAKED)
    n = r.randint(2, 12)
    total = 12 * n
    used = r.randint(2, total - 1)
    text = (
        f"{p} {r.choice(['buys', 'makes'])} {n} dozen {b.many} for a party. The guests eat {used} of them. "
        f"{q} takes the rest home. How many {b.many} does {q} take home?"
    )
    steps = [
        f"{p} has {n} * 12 = {b.n(total)}.",
        f"So {q} takes {total} - {used} = {b.n(total - used)} home.",
    ]
    return text, steps, total - used


def pizza_slices(r: random.Random) -> Problem:
    n, s, people = r.randint(2, 9), r.choice([6, 8, 10, 12]), r.randint(2, 8)
    each = r.randint(1, max(1, (n * s - 1) // people))
    if people * each >= n * s:
        people, each = 2, 3
    total, eaten = n * s, people * each
    p = one_person(r)
    text = (
        f"{p} orders {n} pizzas. Each pizza has {s} slices. {people} people eat {unit(each, 'slice')} each. "
        f"How many slices are left?"
    )
    steps = [
        f"In total, there are {n} * {s} = {total} slices.",
        f"The people eat {people} * {each} = {eaten} slices.",
        f"So there are {total} - {eaten} = {unit(total - eaten, 'slice')} left.",
    ]
    return text, steps, total - eaten


# ---------------------------------------------------------------------------------------------------------------------
# Time, speed, rates, reading
# ---------------------------------------------------------------------------------------------------------------------


def distance(r: random.Random) -> Problem:
    p = one_person(r)
    verb, unit_, lo, hi = r.choice(
        [
            ("drives", "miles", 30, 70),
            ("walks", "miles", 2, 4),
            ("rides a bike", "miles", 8, 15),
            ("runs", "miles", 5, 9),
        ]
    )
    v, h, g = r.randint(lo, hi), r.randint(2, 6), r.randint(2, 5)
    w = r.randint(lo, hi)
    text = (
        f"{p} {verb} for {h} hours at {v} {unit_} per hour. Then {p.sub} {verb} for {g} hours at {w} {unit_} per hour. "
        f"How many {unit_} does {p} travel in total?"
    )
    steps = [
        f"First, {p} travels {h} * {v} = {h * v} {unit_}.",
        f"Then, {p} travels {g} * {w} = {g * w} {unit_}.",
        f"In total, {p} travels {h * v} + {g * w} = {h * v + g * w} {unit_}.",
    ]
    return text, steps, h * v + g * w


def travel_time(r: random.Random) -> Problem:
    kind = r.choice(["car", "train", "bus", "truck"])
    v, h, g = r.randint(20, 80), r.randint(2, 6), r.randint(2, 6)
    text = (
        f"A {kind} travels {v * h} miles in {h} hours. It keeps going at the same speed. "
        f"{r.choice(['How many hours does it need', 'How many hours will it take'])} to travel {v * g} miles?"
    )
    steps = [
        f"The speed of the {kind} is {v * h} / {h} = {v} miles per hour.",
        f"So the {kind} needs {v * g} / {v} = {g} hours.",
    ]
    return text, steps, g


def round_trip(r: random.Random) -> Problem:
    p = one_person(r)
    d, days = r.randint(2, 20), r.randint(2, 7)
    place = r.choice(PLACES)
    text = (
        f"{p} lives {d} miles from the {place}. {p.cap} goes there and back {days} days a week. "
        f"How many miles does {p} travel in a week?"
    )
    steps = [
        f"Each day, {p} travels {d} * 2 = {d * 2} miles.",
        f"In a week, {p} travels {d * 2} * {days} = {d * 2 * days} miles.",
    ]
    return text, steps, d * 2 * days


def trip_left(r: random.Random) -> Problem:
    p = one_person(r)
    a, b, left = r.randint(10, 150), r.randint(10, 150), r.randint(5, 200)
    total = a + b + left
    x, y = two_days(r)
    text = (
        f"{p} is on a trip of {total} miles. {p.cap} travels {a} miles on {x} and {b} miles on {y}. "
        f"How many miles are left?"
    )
    steps = [f"{p} travels {a} + {b} = {a + b} miles.", f"So {p} has {total} - {a + b} = {left} miles left."]
    return text, steps, left


def fuel(r: random.Random) -> Problem:
    p = one_person(r)
    mpg, gallons, c = r.randint(15, 40), r.randint(3, 15), r.randint(2, 5)
    text = (
        f"{p}'s car goes {mpg} miles on one gallon of gas. Gas costs ${c} per gallon. "
        f"How much does {p} pay for the gas for a trip of {mpg * gallons} miles?"
    )
    steps = [
        f"{p} needs {mpg * gallons} / {mpg} = {gallons} gallons.",
        f"So {p} pays {gallons} * ${c} = ${gallons * c}.",
    ]
    return text, steps, gallons * c


def pages_left(r: random.Random) -> Problem:
    p = one_person(r)
    a, days, n = r.randint(5, 40), r.randint(2, 9), r.randint(2, 9)
    rest = a * n
    per, total = a, a * days + rest
    text = (
        f"{p} is reading a book with {total} pages. {p.cap} reads {per} pages a day for {days} days. "
        f"{r.choice(['How many pages are left to read?', f'How many pages does {p} have left?'])}"
    )
    steps = [
        f"{p} reads {days} * {per} = {days * per} pages.",
        f"So {p} has {total} - {days * per} = {rest} pages left.",
    ]
    return text, steps, rest


def pages_per_day(r: random.Random) -> Problem:
    p = one_person(r)
    a, k, days, per = r.randint(5, 30), r.randint(2, 3), r.randint(2, 9), r.randint(4, 30)
    x, y = two_days(r)
    read = a + a * k
    total = read + days * per
    text = (
        f"{p} has a book with {total} pages. {p.cap} reads {a} pages on {x} and {TIMES_WORD[k]} as many on {y}. "
        f"{p.cap} wants to finish the rest in {days} days. How many pages should {p} read per day?"
    )
    steps = [
        f"On {y}, {p} reads {a} * {k} = {a * k} pages.",
        f"In total, {p} reads {a} + {a * k} = {read} pages.",
        f"So {p} has {total} - {read} = {days * per} pages left.",
        f"So {p} should read {days * per} / {days} = {per} pages per day.",
    ]
    return text, steps, per


def minutes_total(r: random.Random) -> Problem:
    p = one_person(r)
    act = r.choice(["practices the piano", "exercises", "reads", "studies math", "walks the dog", "plays chess"])
    m, days = r.choice(
        [(20, 3), (20, 6), (30, 2), (30, 4), (30, 6), (15, 4), (40, 3), (40, 6), (45, 4), (60, 5), (12, 5)]
    )
    weeks = r.randint(2, 6)
    hours = m * days // 60
    text = (
        f"{p} {act} for {m} minutes a day, {days} days a week. How many hours does {p} spend on this in {weeks} weeks?"
    )
    steps = [
        f"Each week, {p} spends {m} * {days} = {m * days} minutes.",
        f"That is {m * days} / 60 = {unit(hours, 'hour')} a week.",
        f"In {weeks} weeks, {p} spends {hours} * {weeks} = {hours * weeks} hours.",
    ]
    return text, steps, hours * weeks


def hours_to_minutes(r: random.Random) -> Problem:
    p = one_person(r)
    h, m = r.randint(2, 5), r.choice([5, 10, 15, 20, 30, 45])
    what = r.choice(["A film", "A concert", "A game", "A flight", "A lesson"])
    seen = r.randint(10, 100)
    text = f"{what} lasts {h} hours and {m} minutes. {p} has been there for {seen} minutes. How many minutes are left?"
    total = h * 60 + m
    steps = [
        f"First, {h} hours are {h} * 60 = {h * 60} minutes.",
        f"In total, it lasts {h * 60} + {m} = {total} minutes.",
        f"So there are {total} - {seen} = {total - seen} minutes left.",
    ]
    return text, steps, total - seen


def weeks_to_days(r: random.Random) -> Problem:
    p = one_person(r)
    it = r.choice(nouns("apple, orange, banana, cookie, glass of milk, cup of tea, egg"))
    n, w = r.randint(2, 6), r.randint(2, 8)
    verb = "drinks" if " of " in it.one else "eats"
    text = f"{p} {verb} {it.n(n)} every day. How many {it.many} does {p} {verb[:-1]} in {w} weeks?"
    steps = [
        f"First, {w} weeks are {w} * 7 = {w * 7} days.",
        f"So {p} {verb} {n} * {w * 7} = {it.n(n * w * 7)}.",
    ]
    return text, steps, n * w * 7


def machine_rate(r: random.Random) -> Problem:
    it = r.choice(MADE)
    rate, h, h2 = r.randint(3, 40), r.randint(2, 8), r.randint(2, 12)
    text = (
        f"A machine makes {it.n(rate * h)} in {h} hours. "
        f"{r.choice(['At the same rate, how', 'How'])} many {it.many} does it make in {h2} hours?"
    )
    steps = [
        f"In one hour, the machine makes {rate * h} / {h} = {it.n(rate)}.",
        f"In {h2} hours, the machine makes {rate} * {h2} = {it.n(rate * h2)}.",
    ]
    return text, steps, rate * h2


def workers_rate(r: random.Random) -> Problem:
    it = r.choice(MADE)
    n, k, h = r.randint(2, 10), r.randint(2, 9), r.randint(2, 8)
    total = n * k * h
    bad = r.randint(2, max(2, total // 4))
    text = (
        f"A factory has {n} workers. Each worker makes {it.n(k)} per hour. In a day of {h} hours, {bad} of the "
        f"{it.many} are broken. How many good {it.many} does the factory make in a day?"
    )
    steps = [
        f"In one hour, the workers make {n} * {k} = {it.n(n * k)}.",
        f"In {h} hours, the workers make {n * k} * {h} = {it.n(total)}.",
        f"So there are {total} - {bad} = {total - bad} good {it.many}.",
    ]
    return text, steps, total - bad


def fill_tank(r: random.Random) -> Problem:
    leak = r.randint(1, 5)
    rate, minutes = leak + r.randint(2, 15), r.randint(3, 20)
    net = rate - leak
    what = r.choice(["tank", "pool", "barrel", "tub"])
    text = (
        f"A {what} holds {net * minutes} liters. A pipe puts in {rate} liters each minute, but "
        f"{unit(leak, 'liter')} {'leaks' if leak == 1 else 'leak'} out each minute. "
        f"How many minutes does it take to fill the empty {what}?"
    )
    steps = [
        f"Each minute, the {what} gains {rate} - {leak} = {net} liters.",
        f"So it takes {net * minutes} / {net} = {minutes} minutes.",
    ]
    return text, steps, minutes


def growing(r: random.Random) -> Problem:
    what = r.choice(["tree", "sunflower", "vine", "corn plant", "bean plant"])
    a, g, n = r.randint(2, 40), r.randint(2, 9), r.randint(2, 12)
    when = r.choice(["week", "month", "year"])
    text = (
        f"A {what} is {a} inches tall. It grows {g} inches every {when}. How tall will the {what} be after {n} {when}s?"
    )
    steps = [
        f"In {n} {when}s, the {what} grows {n} * {g} = {n * g} inches.",
        f"So the {what} will be {a} + {n * g} = {a + n * g} inches tall.",
    ]
    return text, steps, a + n * g


# ---------------------------------------------------------------------------------------------------------------------
# Shapes, averages, longer combinations
# ---------------------------------------------------------------------------------------------------------------------


def area_cost(r: random.Random) -> Problem:
    p = one_person(r)
    a, b, c = r.randint(3, 15), r.randint(3, 12), r.randint(2, 6)
    place, cover = r.choice([("room", "carpet"), ("hall", "wood"), ("garden", "grass"), ("floor", "tiles")])
    text = f"A {place} is {a} feet long and {b} feet wide. "
    first = f"The area of the {place} is {a} * {b} = {a * b} square feet."
    if r.random() < 0.4:
        return text + f"What is the area of the {place} in square feet?", [first], a * b
    verb = "cost" if cover == "tiles" else "costs"
    text += f"{p} wants to cover it. {cover.capitalize()} {verb} ${c} per square foot. How much does {p} pay?"
    return text, [first, f"So {p} pays {a * b} * ${c} = ${a * b * c}."], a * b * c


def perimeter_cost(r: random.Random) -> Problem:
    p = one_person(r)
    a, b, c = r.randint(5, 40), r.randint(3, 30), r.randint(2, 9)
    place = r.choice(["garden", "field", "yard", "park"])
    text = f"{p} has a rectangular {place} that is {a} meters long and {b} meters wide. "
    steps = [
        f"The length and the width are {a} + {b} = {a + b} meters.",
        f"So the perimeter is 2 * {a + b} = {2 * (a + b)} meters.",
    ]
    if r.random() < 0.5:
        return text + f"What is the perimeter of the {place} in meters?", steps, 2 * (a + b)
    steps.append(f"So {p} pays {2 * (a + b)} * ${c} = ${2 * (a + b) * c}.")
    text += f"{p.cap} puts a fence around it that costs ${c} per meter. How much does the fence cost?"
    return text, steps, 2 * (a + b) * c


def average(r: random.Random) -> Problem:
    p = one_person(r)
    mean = r.randint(10, 90)
    n = r.choice([3, 4])
    if n == 3:
        d = r.randint(1, 9)
        e = r.randint(1, 9)
        xs = [mean + d, mean - e, mean - d + e]
    else:
        d, e = r.randint(1, 9), r.randint(1, 9)
        xs = [mean + d, mean - d, mean + e, mean - e]
    r.shuffle(xs)
    total = n * mean
    listed = ", ".join(map(str, xs[:-1])) + f" and {xs[-1]}"
    what = r.choice(["scores {} points in {} games", "gets {} points on {} tests", "reads {} pages on {} days"])
    ask = "number of pages" if "pages" in what else "number of points"
    text = f"{p} {what.format(listed, n)}. What is the average {ask}?"
    thing = "pages" if "pages" in what else "points"
    steps = [
        f"In total, {p} has {' + '.join(map(str, xs))} = {total} {thing}.",
        f"So the average is {total} / {n} = {mean} {thing}.",
    ]
    return text, steps, mean


def average_missing(r: random.Random) -> Problem:
    p = one_person(r)
    mean = r.randint(60, 90)
    a, b = mean + r.randint(-8, 8), mean + r.randint(-8, 8)
    last = 3 * mean - a - b
    text = (
        f"{p} got {a} points on the first test and {b} points on the second test. {p.cap} wants an average of {mean} "
        f"points on three tests. How many points does {p} need on the third test?"
    )
    steps = [
        f"In total, {p} needs 3 * {mean} = {3 * mean} points.",
        f"{p} already has {a} + {b} = {a + b} points.",
        f"So {p} needs {3 * mean} - {a + b} = {last} points.",
    ]
    return text, steps, last


def two_day_sales(r: random.Random) -> Problem:
    p = one_person(r)
    it = r.choice(GOODS)
    x, y = two_days(r)
    a, k, c = r.randint(3, 25), r.randint(2, 4), r.randint(2, 9)
    total = a + a * k
    text = (
        f"{p} sells {it.many} for ${c} each. On {x}, {p.sub} sold {it.n(a)}. On {y}, {p.sub} sold {TIMES_WORD[k]} as "
        f"many. How much money did {p} make in the two days?"
    )
    steps = [
        f"On {y}, {p} sold {a} * {k} = {it.n(a * k)}.",
        f"In total, {p} sold {a} + {a * k} = {it.n(total)}.",
        f"So {p} made {total} * ${c} = ${total * c}.",
    ]
    return text, steps, total * c


def half_on_second_day(r: random.Random) -> Problem:
    p = one_person(r)
    it = r.choice(THINGS)
    k, b = r.randint(2, 4), r.randint(3, 60)
    a = k * b
    verb, did = r.choice([("sold", "sell"), ("collected", "collect"), ("found", "find"), ("bought", "buy")])
    x, y = two_days(r)
    text = (
        f"On {x}, {p} {verb} {it.n(a)}. On {y}, {p.sub} {verb} only {FRACTIONS[k]} as many. "
        f"How many {it.many} did {p} {did} on both days together?"
    )
    steps = [f"On {y}, {p} {verb} {a} / {k} = {it.n(b)}.", f"In total, {p} {verb} {a} + {b} = {it.n(a + b)}."]
    return text, steps, a + b


def school_trip(r: random.Random) -> Problem:
    classes, per, adults, c = r.randint(2, 6), r.randint(8, 25), r.randint(2, 9), r.randint(2, 8)
    kids = classes * per
    total = kids + adults
    text = (
        f"There are {classes} classes with {per} students each on a trip to the {r.choice(PLACES)}. "
        f"{adults} teachers go with them. Each ticket costs ${c}. How much do all the tickets cost?"
    )
    steps = [
        f"There are {classes} * {per} = {kids} students.",
        f"In total, there are {kids} + {adults} = {total} people.",
        f"So the tickets cost {total} * ${c} = ${total * c}.",
    ]
    return text, steps, total * c


def tickets_two_prices(r: random.Random) -> Problem:
    a, b = r.randint(2, 9), r.randint(2, 9)
    kid = r.randint(3, 12)
    more = r.randint(2, 10)
    adult = kid + more
    where = r.choice(["zoo", "museum", "cinema", "circus", "pool"])
    text = (
        f"At the {where}, a child ticket costs ${kid}. An adult ticket costs ${more} more than a child ticket. "
        f"How much do {a} adult tickets and {b} child tickets cost in total?"
    )
    steps = [
        f"Each adult ticket costs ${kid} + ${more} = ${adult}.",
        f"The adult tickets cost {a} * ${adult} = ${a * adult}.",
        f"The child tickets cost {b} * ${kid} = ${b * kid}.",
        f"In total, the tickets cost ${a * adult} + ${b * kid} = ${a * adult + b * kid}.",
    ]
    return text, steps, a * adult + b * kid


def installments(r: random.Random) -> Problem:
    p = one_person(r)
    it = r.choice(DEAR)
    down, n, pay = r.randint(10, 90), r.choice([3, 4, 5, 6, 8, 10, 12]), r.randint(5, 50)
    price = down + n * pay
    text = (
        f"{p} buys {article(it.one)} for ${price}. {p.cap} pays ${down} at once and the rest in {n} equal monthly "
        f"payments. How much is each monthly payment?"
    )
    steps = [
        f"{p} has ${price} - ${down} = ${n * pay} left to pay.",
        f"So each payment is ${n * pay} / {n} = ${pay}.",
    ]
    return text, steps, pay


def split_bill(r: random.Random) -> Problem:
    p = one_person(r)
    x, y = r.sample(nouns("pizza, burger, sandwich, salad, cake, bottle of juice, coffee, soup"), 2)
    people = r.randint(2, 6)
    n, c, m, d = people, r.randint(3, 12), people * r.randint(1, 2), r.randint(2, 9)
    total = n * c + m * d
    text = (
        f"{p} and {unit(people - 1, 'friend')} order {x.n(n)} for ${c} each and {y.n(m)} for ${d} each. "
        f"They split the bill equally. How much does each of them pay?"
    )
    steps = [
        f"The {x.many} cost {n} * ${c} = ${n * c}.",
        f"The {y.many} cost {m} * ${d} = ${m * d}.",
        f"In total, they pay ${n * c} + ${m * d} = ${total}.",
        f"There are 1 + {people - 1} = {people} people.",
        f"So each of them pays ${total} / {people} = ${total // people}.",
    ]
    return text, steps, total // people


def percent_then_rest(r: random.Random) -> Problem:
    p, q = two_people(r)
    it = r.choice(THINGS)
    percent, total = percent_pair(r, 20)
    part = total * percent // 100
    rest = total - part
    more = r.randint(2, 30)
    text = (
        f"{p} had {it.n(total)}. {p.cap} gave {percent}% of them to {q}. Then {p.sub} got {more} more. "
        f"How many {it.many} does {p} have now?"
    )
    steps = [
        f"{p} gave {q} {total} * {percent} / 100 = {it.n(part)}.",
        f"Then {p} had {total} - {part} = {it.n(rest)} left.",
        f"So {p} has {rest} + {more} = {it.n(rest + more)}.",
    ]
    return text, steps, rest + more


def pages_written(r: random.Random) -> Problem:
    p = one_person(r)
    n, per, days, weeks = r.randint(2, 6), r.randint(2, 4), r.randint(2, 5), r.randint(2, 6)
    it = r.choice(["song", "poem", "short story", "report"])
    it_many = noun(it).many
    week = n * per * days
    text = (
        f"{p} writes {n} {it_many} a day, {days} days a week. Each {it} has {per} pages. "
        f"How many pages does {p} write in {weeks} weeks?"
    )
    steps = [
        f"Each day, {p} writes {n} * {per} = {n * per} pages.",
        f"Each week, {p} writes {n * per} * {days} = {week} pages.",
        f"In {weeks} weeks, {p} writes {week} * {weeks} = {week * weeks} pages.",
    ]
    return text, steps, week * weeks


def mix_drinks(r: random.Random) -> Problem:
    p = one_person(r)
    k, b, n = r.randint(2, 4), r.randint(2, 12), r.randint(2, 6)
    a = k * b
    dish, x, y = r.choice(
        [("bowl of punch", "juice", "water"), ("pot of soup", "water", "milk"), ("jug of iced tea", "tea", "syrup")]
    )
    text = (
        f"For each {dish}, {p} mixes {a} cups of {x} with {FRACTIONS[k]} as much {y}. "
        f"How many cups of {y} does {p} need for {n} of them?"
    )
    steps = [
        f"For each {dish}, {p} needs {a} / {k} = {b} cups of {y}.",
        f"In total, {p} needs {b} * {n} = {b * n} cups of {y}.",
    ]
    return text, steps, b * n


FAMILIES: list[Family] = [
    bare_two, bare_mul_add, bare_three, bare_brackets, bare_percent,
    gain, loss, several_removals, gain_then_loss, half_then_some, work_backwards, backwards_half, bus_passengers,
    times_as_many, more_than, fewer_than, three_compare, half_as_many, ages_future, ages_times, ages_parent,
    buy_one_kind, change, two_kinds, two_kinds_change, three_items, unit_price, how_many_can_buy, discount,
    discount_many, price_rise, price_cents, tip,
    earn_week, earn_two_jobs, overtime, save_weeks, save_and_spend, chores, profit, stand_profit, rent,
    share, share_after, pool_share, containers, pack_up, seats, class_fraction, class_percent, two_fractions, teams,
    eggs_sell, eggs_dozen, farm_legs, farm_count, feed, orchard, bake_ingredients, bake_left, dozens, pizza_slices,
    distance, travel_time, round_trip, trip_left, fuel, pages_left, pages_per_day, minutes_total, hours_to_minutes,
    weeks_to_days, machine_rate, workers_rate, fill_tank, growing,
    area_cost, perimeter_cost, average, average_missing, two_day_sales, half_on_second_day, school_trip,
    tickets_two_prices, installments, split_bill, percent_then_rest, pages_written, mix_drinks,
]  # fmt: skip


def word_problem(rng: random.Random) -> tuple[str, str]:
    """Draw one problem. Returns (question, answer)."""
    question, steps, result = rng.choice(FAMILIES)(rng)
    return question, "\n".join([*steps, f"The answer is \\boxed{{{result}}}."])


if __name__ == "__main__":
    demo = random.Random()
    for _ in range(10):
        print("\n".join(word_problem(demo)), end="\n\n")
