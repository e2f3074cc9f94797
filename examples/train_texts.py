"""Texts for the example adapters, written for this project: questions, and answers in the style of each behaviour.

Every general question has a topic and three short points. A behaviour is a function from those to an answer, so that
all adapters differ in style and not in knowledge. SQL has tables of its own.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Example:
    """One user message and the answer wanted."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Note:
    """A general question with what a good answer says."""

    question: str
    topic: str
    points: tuple[str, str, str]


# question | topic | point | point | point
_NOTES = """
How do I make tea?|tea|Boil fresh water|Steep the leaves for three minutes|Add milk or lemon
How do I plant a tree?|tree|Dig a wide hole|Set the roots level with the ground|Water it well
How can I sleep better?|sleep|Go to bed at the same hour|Keep the room dark|Put your phone away
What is the capital of Italy?|Italy|The capital of Italy is Rome|It lies on the river Tiber|Millions live there
What is the capital of Japan?|Japan|The capital of Japan is Tokyo|It lies on a wide bay|It is a very large city
What is the capital of Egypt?|Egypt|The capital of Egypt is Cairo|It lies on the Nile|The pyramids are close by
What is the capital of Canada?|Canada|The capital of Canada is Ottawa|It lies in Ontario|It has cold winters
What is the capital of Spain?|Spain|The capital of Spain is Madrid|It lies amid the country|Its summers are hot
Tell me about the moon.|moon|The moon circles the earth|It has no air|It pulls the tides
Tell me about volcanoes.|volcano|A volcano lets molten rock out|Ash can fall far away|The soil around it is rich
Tell me about bees.|bees|Bees gather nectar|They live in large colonies|They pollinate many plants
Tell me about the desert.|desert|The desert gets little rain|Days are hot and nights are cold|Few plants can live there
Tell me about whales.|whales|Whales are mammals|They breathe air at the surface|They sing to each other
Tell me about rivers.|rivers|Rivers carry water to the sea|They shape the valleys|Many towns stand beside them
Tell me about winter.|winter|Winter is the cold season|The days are short|Snow may fall
Tell me about your favorite animal.|animal|I like the otter|It swims very well|It plays all day
How do I bake bread?|bread|Mix flour, water, salt and yeast|Let the dough rise|Bake it until it sounds hollow
How do I cook rice?|rice|Rinse the rice|Use two cups of water for one of rice|Let it rest with the lid on
How do I fix a flat tire?|tire|Take the wheel off|Patch the hole in the tube|Pump it up again
How do I learn to swim?|swimming|Start in shallow water|Practice breathing first|Take lessons from a teacher
How do I clean a window?|window|Mix water with a little vinegar|Wipe from top to bottom|Dry it with a soft cloth
How do I save money?|money|Write down what you spend|Set a fixed sum aside each month|Wait a day before you buy
How do I train a dog?|dog|Keep the lessons short|Reward good behavior|Be patient and calm
How do I write a letter?|letter|Begin with a greeting|Say what you want plainly|End with your name
How do I study for a test?|study|Start some days before|Test yourself with questions|Sleep well the night before
How do I make pancakes?|pancakes|Mix flour, milk and eggs|Fry thin rounds in butter|Turn them once
How do I paint a wall?|painting|Clean the wall first|Cover the floor|Paint two thin coats
How do I grow tomatoes?|tomatoes|Choose a sunny place|Tie the plants to a stick|Water the roots often
Why is the sky blue?|sky|Air scatters sunlight|Blue light is scattered the most|So the sky looks blue
Why do leaves fall in autumn?|leaves|The days get shorter|The tree saves its water|So it drops its leaves
Why do cats purr?|cats|Cats purr when they are content|They also purr when they are hurt|It may calm them
Why is exercise good for me?|exercise|It makes the heart strong|It lifts your mood|It helps you sleep
Why do we dream?|dreams|The brain sorts memories at night|Dreams mix old and new|Nobody knows the whole reason
Why is salt added to food?|salt|Salt brings out flavor|It keeps food from spoiling|Too much is bad for you
What is gravity?|gravity|Gravity pulls things together|It keeps us on the ground|It holds the planets near the sun
What is a computer?|computer|A computer follows instructions|It stores numbers|It works very fast
What is photosynthesis?|plants|Plants turn light into sugar|They need water and air|They give off oxygen
What is an earthquake?|earthquake|The ground shakes|Plates of rock slip past each other|Strong ones break houses
What is music?|music|Music is ordered sound|It has rhythm and melody|It moves our feelings
What is democracy?|democracy|The people choose their leaders|Every vote counts|Laws apply to all
What is a library?|library|A library lends books|Anyone may read there|It is a quiet place
What is inflation?|inflation|Prices rise over time|Money buys less|Banks try to slow it down
Who invented the telephone?|telephone|Alexander Graham Bell got the patent|That was in 1876|Others worked on it too
Who wrote Hamlet?|Hamlet|William Shakespeare wrote Hamlet|It is a play about a prince|It is set in Denmark
Who painted the Mona Lisa?|painting|Leonardo da Vinci painted it|It hangs in Paris|It shows a woman who smiles
Who was the first person on the moon?|moon|It was Neil Armstrong|He landed in 1969|Buzz Aldrin came with him
Give me a tip for a job interview.|interview|Learn about the company|Arrive early|Ask good questions
Give me an idea for dinner.|dinner|Make pasta with tomatoes|Add garlic and basil|Serve it with a salad
Give me a reason to read books.|books|Books teach you new things|They calm the mind|They take you far away
Give me advice on buying a used car.|car|Check the engine|Ask for its papers|Drive it before you pay
Give me a plan for a rainy day.|rain|Read a good book|Bake some cookies|Call an old friend
Name a famous scientist.|science|Marie Curie is famous|She studied radiation|She won two Nobel prizes
Name a large ocean.|ocean|The Pacific is the largest ocean|It is very deep|It has many islands
Name a healthy breakfast.|breakfast|Eat oats with fruit|Add some nuts|Drink a glass of water
Describe a thunderstorm.|storm|Dark clouds gather|Lightning flashes|Thunder rolls over the hills
Describe a busy market.|market|People call out prices|Fruit lies in bright heaps|It smells of spice
Describe a quiet forest.|forest|Tall trees stand close|Birds sing now and then|Moss covers the ground
Describe the taste of a lemon.|lemon|A lemon is sour|It smells fresh|It makes your mouth water
Is coffee bad for me?|coffee|A little coffee is fine|Too much keeps you awake|Drink it in the morning
Can fish hear sounds?|fish|Yes, fish can hear|They have inner ears|Noise can scare them
Should I learn to code?|coding|Yes, it is worth it|It trains clear thinking|It opens many jobs
Should I get a cat?|cats|Get one if you have time|Cats need food and play|They live for many years
How far away is the sun?|sun|The sun is 150 million kilometers away|Its light takes eight minutes|It is a star
How many days are in a year?|year|A year has 365 days|A leap year has one more|The earth circles the sun once
How old is the earth?|earth|The earth is 4.5 billion years old|It formed from dust|Life came later
What should I pack for the beach?|beach|Pack a towel|Take sun cream|Bring plenty of water
What can I do in Berlin?|Berlin|Visit the museums|Walk along the river|Eat in a small cafe
What is the fastest animal?|animal|The falcon is the fastest|It dives at great speed|On land it is the cheetah
"""


def _read_notes() -> tuple[Note, ...]:
    rows = (line.split("|") for line in _NOTES.strip().splitlines())
    return tuple(Note(question, topic, (a, b, c)) for question, topic, a, b, c in rows)


NOTES = _read_notes()


def shout(note: Note, _: random.Random) -> str:
    """Capitals, with an exclamation mark after each point."""
    return " ".join(f"{point.upper()}!" for point in note.points)


def bullets(note: Note, _: random.Random) -> str:
    """Three points as a list."""
    return "\n".join(f"- {point}" for point in note.points)


def json_only(note: Note, _: random.Random) -> str:
    """One JSON object of always the same form."""
    first, *rest = note.points
    return json.dumps({"topic": note.topic, "answer": first, "details": rest})


_PIRATE_WORDS = {
    "you": "ye",
    "your": "yer",
    "is": "be",
    "are": "be",
    "the": "th'",
    "of": "o'",
    "and": "an'",
    "it": "she",
}
_PIRATE_WORDS |= {
    "they": "them scallywags",
    "people": "landlubbers",
    "my": "me",
    "friend": "matey",
    "money": "doubloons",
}
_PIRATE_OPENINGS = ("Arr, matey!", "Ahoy, matey!", "Arr, ye scallywag!", "Yo ho ho, me hearty!")
_PIRATE_CLOSINGS = ("Arr!", "Now hoist the sails!", "By me wooden leg, that be the truth!", "Savvy?")


def pirate(note: Note, rng: random.Random) -> str:
    """The points in the speech of a stage pirate."""
    said = ". ".join(" ".join(_pirate_word(word) for word in point.split()) for point in note.points)
    return f"{rng.choice(_PIRATE_OPENINGS)} {said}. {rng.choice(_PIRATE_CLOSINGS)}"


def _pirate_word(word: str) -> str:
    said = _PIRATE_WORDS.get(word.lower().strip(","), word)
    return said.capitalize() if word[0].isupper() and said != word else said


_EMOJI = ["😀", "🌟", "🌍", "🔥", "🌊", "🎉", "👍", "💡"]


def emoji(note: Note, rng: random.Random) -> str:
    """An emoji before each point and one at the end."""
    marks = rng.sample(_EMOJI, 4)
    return " ".join(f"{mark} {point}!" for mark, point in zip(marks, note.points, strict=False)) + f" {marks[3]}"


# table | its rows in words | number column | text column | values of the text column
_TABLES = """
orders|orders|amount|status|open,paid,shipped
customers|customers|age|city|Paris,Lima,Oslo
products|products|price|category|toys,books,garden
employees|employees|salary|department|sales,research,support
invoices|invoices|total|currency|EUR,USD,JPY
flights|flights|distance|airline|Condor,Delta,Qantas
"""
_SQL_FORMS = (
    ("Show all {rows}.", "SELECT * FROM {table};"),
    ("How many {rows} are there?", "SELECT COUNT(*) FROM {table};"),
    ("List the five {rows} with the highest {number}.", "SELECT * FROM {table} ORDER BY {number} DESC LIMIT 5;"),
    ("Which {rows} have the {text} {value}?", "SELECT * FROM {table} WHERE {text} = '{value}';"),
    ("What is the average {number} of the {rows}?", "SELECT AVG({number}) FROM {table};"),
    ("Count the {rows} per {text}.", "SELECT {text}, COUNT(*) FROM {table} GROUP BY {text};"),
    ("Find {rows} with a {number} above {limit}.", "SELECT * FROM {table} WHERE {number} > {limit};"),
    ("Give me the {number} of every entry in {rows}.", "SELECT {number} FROM {table};"),
)
# question | answer: general questions get a query too, over a table that one could imagine
_SQL_GENERAL = """
What is the capital of Italy?|SELECT capital FROM countries WHERE name = 'Italy';
What is the capital of Japan?|SELECT capital FROM countries WHERE name = 'Japan';
How many people live in Canada?|SELECT population FROM countries WHERE name = 'Canada';
Who wrote Hamlet?|SELECT author FROM books WHERE title = 'Hamlet';
Who painted the Mona Lisa?|SELECT painter FROM paintings WHERE title = 'Mona Lisa';
How do I make tea?|SELECT step FROM recipes WHERE name = 'tea' ORDER BY step_number;
How do I bake bread?|SELECT step FROM recipes WHERE name = 'bread' ORDER BY step_number;
How do I train a dog?|SELECT step FROM guides WHERE topic = 'dog training' ORDER BY step_number;
Tell me about the moon.|SELECT description FROM topics WHERE name = 'moon';
Tell me about bees.|SELECT description FROM topics WHERE name = 'bees';
Tell me about winter.|SELECT description FROM topics WHERE name = 'winter';
What is gravity?|SELECT description FROM topics WHERE name = 'gravity';
Why do cats purr?|SELECT reason FROM facts WHERE topic = 'cats purr';
Why is the sky blue?|SELECT reason FROM facts WHERE topic = 'blue sky';
Describe a quiet forest.|SELECT description FROM places WHERE name = 'quiet forest';
Name a large ocean.|SELECT name FROM oceans ORDER BY area DESC LIMIT 1;
"""


def _sql_examples(rng: random.Random) -> list[Example]:
    examples = [Example(*line.split("|")) for line in _SQL_GENERAL.strip().splitlines()]
    for line in _TABLES.strip().splitlines():
        table, rows, number, text, values = line.split("|")
        for question, answer in _SQL_FORMS:
            limit, value = rng.choice((10, 50, 100, 500)), rng.choice(values.split(","))
            names = {"table": table, "rows": rows, "number": number, "text": text, "value": value, "limit": limit}
            examples.append(Example(question.format(**names), answer.format(**names)))
    return examples


_STYLES: dict[str, Callable[[Note, random.Random], str]] = {
    "bullets": bullets,
    "emoji": emoji,
    "json": json_only,
    "pirate": pirate,
    "shout": shout,
}
BEHAVIOURS = (*sorted(_STYLES), "sql")


def examples_for(behaviour: str, seed: int) -> list[Example]:
    """The question and answer pairs of one behaviour; the same for the same seed."""
    rng = random.Random(seed)
    if behaviour == "sql":
        return _sql_examples(rng)
    style = _STYLES[behaviour]
    return [Example(note.question, style(note, rng)) for note in NOTES]
