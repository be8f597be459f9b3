"""Build the list of prompts: `prompts.jsonl`, one task a line, in an order in which any beginning is the same mixture.

The list depends on the data, the seed and nothing else, so it can be built again at any time. A task is one of these:

    {"id": "0f3a...", "kind": "edit", "turns": [{"text": "Rename ..."}, {"text": "Now ..."}]}
    {"id": "17c2...", "kind": "question", "turns": [{"opening": "How do I", "author": "You help a Go programmer."}]}
    {"id": "93b0...", "kind": "fim", "text": "<|fim_prefix|>..."}

A turn is a user's message: a `text`, or an `opening` that the target continues as the user (Magpie, arXiv 2406.08464).
`author` is the system message under which it does so, and `stop` the text that ends the message (an empty line).
`system`, `tools` and `temperature` belong to the responses. `id` is a hash of all the rest.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from tools import TOOLS
from wording import (
    CHAT_FOLLOW_UPS,
    CHAT_OPENINGS,
    CHAT_TOPICS,
    COMMIT,
    EDIT_FORMATS,
    EDITS,
    EXERCISE,
    FOLLOW_UPS,
    JSON_REQUESTS,
    PROGRAM_OPENINGS,
    QUESTION_OPENINGS,
    REPAIRS,
    REQUESTS,
    SYSTEMS,
    TOOL_OPENINGS,
    TOPICS,
)

Task: TypeAlias = "dict[str, Any]"
Turn: TypeAlias = "dict[str, str]"
Grams: TypeAlias = "set[tuple[str, ...]]"

# A fifth is general chat and mathematics.
PATTERN = "question edit maths program fim request chat question tools edit fim program maths exercise question repair "
PATTERN += "instruction edit json program fim request function question chat"
LANGUAGES = ("Python", "JavaScript", "TypeScript", "Go", "Rust", "Java", "Kotlin", "C++")
FENCES = {language: language.lower() for language in LANGUAGES} | {"C++": "cpp"}
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LONGEST_EXCERPT = 1400  # characters, so that a whole file fits into a response of 512 tokens
LONGEST_PROMPT = 3600  # characters
FIM_BEFORE, FIM_AFTER = 1000, 400  # characters around the cursor
LICENCE = re.compile(r"\A/\*(?=[^/]*([Cc]opyright|Licen[sc]e)).*?\*/\s*", re.DOTALL)
GRAM = 13  # words in a row that no prompt may share with a measured one


@dataclass(frozen=True)
class File:
    """A source file."""

    language: str
    repository: str
    path: str
    text: str

    @property
    def block(self) -> str:
        """The text in a fenced block."""
        return f"```{FENCES[self.language]}\n{self.text.strip()}\n```"


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def read_files(data: Path) -> list[File]:
    """Return the source files of code_files.jsonl and thealgorithms_python.jsonl, about as many of each language."""
    names = {fence: language for language, fence in FENCES.items()}
    files = [
        File(names[row["language"]], row["repository"], row["path"], LICENCE.sub("", row["text"]))
        for row in read_lines(data / "code_files.jsonl")
        if row["language"] in names and "<|" not in row["text"]
    ]
    algorithms = [
        File("Python", "TheAlgorithms/Python", row["path"], row["text"])
        for row in read_lines(data / "thealgorithms_python.jsonl")
        if 600 <= len(row["text"]) <= 12_000 and "<|" not in row["text"]
    ]
    if not files:
        raise ValueError(
            f"{data / 'code_files.jsonl'} holds no file in one of the languages {', '.join(FENCES.values())}."
        )
    return files + random.Random(0).sample(algorithms, min(100, len(algorithms)))


def excerpt(file: File, rng: random.Random) -> File:
    """Return the file, or, of a longer one, some of its top-level parts in a row."""
    if len(file.text) <= LONGEST_EXCERPT:
        return file
    parts = re.split(r"\n\n+(?=[^\s})\]])", file.text)
    first = rng.randrange(len(parts))
    text = parts[first][:LONGEST_EXCERPT]
    for part in parts[first + 1 :]:
        if len(text) + len(part) > LONGEST_EXCERPT:
            break
        text += "\n\n" + part
    return File(file.language, file.repository, file.path, text)


def excerpts(files: list[File], rng: random.Random) -> Iterator[File]:
    """Yield excerpts without end, each language as often as the next."""
    shuffled = {language: [file for file in files if file.language == language] for language in LANGUAGES}
    for of_language in shuffled.values():
        rng.shuffle(of_language)
    round_ = 0
    while True:
        for of_language in filter(None, shuffled.values()):
            part = excerpt(of_language[round_ % len(of_language)], rng)
            if len(part.text) >= 200:
                yield part
        round_ += 1


def rename(text: str, rng: random.Random) -> tuple[str, str] | None:
    """Return a name that the text uses at least three times, and a new one; None if there is none."""
    words = re.findall(r"\b[a-z_][A-Za-z0-9_]{4,}\b", re.sub(r'(//|#|\*|").*', "", text))
    names = sorted({word for word in words if words.count(word) >= 3 and ("_" in word or word != word.lower())})
    if not names:
        return None
    old = rng.choice(names)
    if "_" in old:
        return old, old.strip("_") + rng.choice(("_value", "_item", "_entry", "_result", "_new"))
    return old, rng.choice(("current", "inner", "base", "my", "raw")) + old[0].upper() + old[1:]


# A maker yields the tasks of one kind, without ids.


def code_chats(openings: dict[str, str | None], rng: random.Random) -> Iterator[Task]:
    """Yield chats about code whose prompts the target writes."""
    while True:
        language = rng.choice(LANGUAGES)
        opening, stop = rng.choice(list(openings.items()))
        opening = opening.format(language=language, fence=FENCES[language])
        yield code_chat(written(opening, f"a {language} programmer", rng.choice(TOPICS), stop), rng)


def general_chats(rng: random.Random) -> Iterator[Task]:
    """Yield general chats whose prompts the target writes."""
    while True:
        turns = [written(rng.choice(CHAT_OPENINGS), "people", rng.choice(CHAT_TOPICS))]
        while len(turns) < 3 and rng.random() < 0.25:
            turns.append({"opening": rng.choice(CHAT_FOLLOW_UPS)})
        yield {"turns": turns} | sampled(rng)


def written(opening: str, person: str, topic: str, stop: str | None = None) -> Turn:
    """Return a turn that the target writes."""
    author = f"You are an assistant that helps {person} with {topic}. The user asks short, concrete questions."
    return {"opening": opening, "author": author} | ({"stop": stop} if stop else {})


def code_chat(first: Turn, rng: random.Random) -> Task:
    """Return a chat about code. A third has one or two further turns, and a fifth a system message."""
    turns = [first]
    if rng.random() < 0.33:
        turns += [{"text": text} for text in rng.sample(FOLLOW_UPS, rng.choice((1, 1, 2)))]
        if rng.random() < 0.4:
            turns[-1] = {"opening": rng.choice(CHAT_FOLLOW_UPS)}
    system = {"system": rng.choice(SYSTEMS)} if rng.random() < 0.2 else {}
    return {"turns": turns} | system | sampled(rng)


def sampled(rng: random.Random) -> Task:
    """Return the temperature of every sixth task; the others are greedy."""
    return {"temperature": 0.7} if rng.random() < 0.17 else {}


def edits(files: list[File], rng: random.Random) -> Iterator[Task]:
    """Yield whole files to be returned with a change."""
    for file in excerpts(files, rng):
        names = rename(file.text, rng)
        if names and rng.random() < 0.35:
            change = "Rename `{}` to `{}` everywhere.".format(*names)
        else:
            change = rng.choice(EDITS)
        text = rng.choice(EDIT_FORMATS).format(change=change, path=file.path, code=file.block)
        turns = [{"text": text}]
        if rng.random() < 0.08:
            turns.append({"text": f"{rng.choice(EDITS)} Return the whole file again."})
        yield {"turns": turns}


def fim(files: list[File], rng: random.Random) -> Iterator[Task]:
    """Yield files with a gap at a cursor: the rest of a line, some lines, or a block."""
    shuffled = {language: [file for file in files if file.language == language] for language in LANGUAGES}
    for number in range(10**9):
        of_language = shuffled[LANGUAGES[number % len(LANGUAGES)]]
        if not of_language:
            continue
        file = rng.choice(of_language)
        lines = file.text.splitlines(keepends=True)
        row = rng.randrange(len(lines))
        begin = sum(map(len, lines[:row]))
        indent = len(lines[row]) - len(lines[row].lstrip())
        begin += indent + (rng.randrange(max(len(lines[row].strip()), 1)) if rng.random() < 0.6 else 0)
        match rng.randrange(3):
            case 0:  # the rest of the line
                last = row
            case 1:
                last = row + rng.randint(1, 6)
            case _:  # to the end of the indented block
                last = row
                while last + 1 < min(len(lines), row + 25) and (
                    not lines[last + 1].strip() or len(lines[last + 1]) - len(lines[last + 1].lstrip()) > indent
                ):
                    last += 1
        end = len("".join(lines[: last + 1]).rstrip("\n"))
        if end <= begin:
            continue
        prefix, suffix = file.text[max(0, begin - FIM_BEFORE) : begin], file.text[end : end + FIM_AFTER]
        text = f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"
        if rng.random() < 0.3:
            text = f"<|repo_name|>{file.repository}\n<|file_sep|>{file.path}\n{text}"
        yield {"text": text}


def requests(files: list[File], rng: random.Random) -> Iterator[Task]:
    """Yield requests about a piece of code: docstrings, tests, commit messages, explanations, translations."""
    for file in excerpts(files, rng):
        if rng.random() < 0.2:
            diff = changed(file, rng)
            if diff is not None:
                yield {"turns": [{"text": rng.choice(COMMIT).format(diff=f"```diff\n{diff}\n```")}]}
            continue
        other = rng.choice([language for language in LANGUAGES if language != file.language])
        text = rng.choice(REQUESTS).format(code=file.block, language=file.language, other=other, path=file.path)
        yield code_chat({"text": text}, rng)


def changed(file: File, rng: random.Random) -> str | None:
    """Return a diff in which a name changes or some lines go; None if the file allows neither."""
    before = file.text.splitlines()
    if (names := rename(file.text, rng)) and rng.random() < 0.5:
        after = re.sub(rf"\b{names[0]}\b", names[1], file.text).splitlines()
    elif len(before) > 12:
        first = rng.randrange(3, len(before) - 6)
        after = before[:first] + before[first + rng.randint(2, 6) :]
    else:
        return None
    if rng.random() < 0.5:
        before, after = after, before
    return "\n".join(difflib.unified_diff(before, after, f"a/{file.path}", f"b/{file.path}", lineterm=""))[:2400]


def repairs(files: list[File], rng: random.Random) -> Iterator[Task]:
    """Yield code whose numbers or comparisons are wrong, to be repaired."""
    swaps = {"<=": "<", ">=": ">", "==": "!=", "&&": "||", " and ": " or ", " + ": " - ", "true": "false", "0": "1"}
    for file in excerpts(files, rng):
        places = [(found.start(), old) for old in swaps for found in re.finditer(re.escape(old), file.text)]
        if places:
            begin, old = rng.choice(places)
            text = file.text[:begin] + swaps[old] + file.text[begin + len(old) :]
            broken = File(file.language, file.repository, file.path, text)
            yield code_chat({"text": rng.choice(REPAIRS).format(code=broken.block, path=file.path)}, rng)


def exercises(data: Path, rng: random.Random) -> Iterator[Task]:
    """Yield every exercise in every language."""
    pairs = [(row["text"], language) for row in read_lines(data / "exercism.jsonl") for language in LANGUAGES]
    rng.shuffle(pairs)
    for text, language in pairs:
        text = text.removeprefix("# Description").strip()
        yield code_chat({"text": rng.choice(EXERCISE).format(text=text, language=language)}, rng)


def functions(data: Path, rng: random.Random) -> Iterator[Task]:
    """Yield functions without their bodies, which are to be written."""
    heads = [*leetcode_heads(data), *algorithm_heads(data)]
    rng.shuffle(heads)
    for head in heads:
        yield {"turns": [{"text": head}]} | sampled(rng)


def leetcode_heads(data: Path) -> Iterator[str]:
    for row in read_lines(data / "leetcode_python.jsonl"):
        tree = parsed(row["text"])
        classes = [node for node in (tree.body if tree else ()) if isinstance(node, ast.ClassDef)]
        methods = [node for node in (classes[0].body if classes else ()) if isinstance(node, ast.FunctionDef)]
        if methods and ast.get_docstring(methods[0]):
            name = Path(row["path"]).stem.replace("-", " ")
            head = "\n".join(row["text"].splitlines()[methods[0].lineno - 1 : methods[0].body[0].end_lineno])
            yield f'Solve the problem "{name}" in Python:\n```python\nclass Solution:\n{head}\n```'


def algorithm_heads(data: Path) -> Iterator[str]:
    for row in read_lines(data / "thealgorithms_python.jsonl"):
        for node in getattr(parsed(row["text"]), "body", ()):
            if isinstance(node, ast.FunctionDef) and ">>>" in (ast.get_docstring(node) or ""):
                head = "\n".join(row["text"].splitlines()[node.lineno - 1 : node.body[0].end_lineno])
                yield f"Complete this function:\n```python\n{head}\n```"
                break


def parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def json_requests(files: list[File], data: Path, rng: random.Random) -> Iterator[Task]:
    """Yield requests whose response is JSON: about code, about a text, or about a topic."""
    stories = [row["question"] for row in read_lines(data / "gsm8k_train.jsonl")]
    for file in excerpts(files, rng):
        text = rng.choice(JSON_REQUESTS)
        text = text.format(code=file.block, story=rng.choice(stories), topic=rng.choice(TOPICS))
        yield {"turns": [{"text": text}]}


def tool_calls(rng: random.Random) -> Iterator[Task]:
    """Yield requests, written by the target, to an assistant that has some tools."""
    while True:
        tools = rng.sample(TOOLS, rng.randint(1, 4))
        names = " and ".join(tool["description"].rstrip(".").lower() for tool in tools[:2])
        turn = {
            "opening": rng.choice(TOOL_OPENINGS),
            "author": f"You are an assistant with tools that {names}. The user asks for one thing that needs a tool.",
            "stop": "\n",
        }
        yield {"tools": [{"type": "function", "function": tool} for tool in tools], "turns": [turn]}


def instructions(data: Path, rng: random.Random) -> Iterator[Task]:
    """Yield general instructions."""
    texts = [row["prompt"].strip() for row in read_lines(data / "instructions.jsonl")]
    rng.shuffle(texts)
    for text in texts:
        yield {"turns": [{"text": text}]} | sampled(rng)


def maths(data: Path, rng: random.Random) -> Iterator[Task]:
    """Yield word problems and problems of mathematics, as many of each."""
    sets = [
        [row["question"] for row in read_lines(data / "gsm8k_train.jsonl")],
        [row["problem"] for row in read_lines(data / "math_train.jsonl")],
    ]
    for texts in sets:
        rng.shuffle(texts)
    for pair in zip(*sets, strict=False):
        for text in pair:
            yield {"turns": [{"text": text + BOXED}]} | sampled(rng)


def makers(data: Path, seed: int) -> dict[str, Iterator[Task]]:
    """Return the makers of all kinds, each with random numbers of its own."""
    files = read_files(data)
    of_kind: dict[str, Callable[[random.Random], Iterator[Task]]] = {
        "question": partial(code_chats, QUESTION_OPENINGS),
        "program": partial(code_chats, PROGRAM_OPENINGS),
        "chat": general_chats,
        "repair": partial(repairs, files),
        "edit": partial(edits, files),
        "fim": partial(fim, files),
        "request": partial(requests, files),
        "exercise": partial(exercises, data),
        "function": partial(functions, data),
        "json": partial(json_requests, files, data),
        "tools": tool_calls,
        "instruction": partial(instructions, data),
        "maths": partial(maths, data),
    }
    return {kind: maker(random.Random(f"{seed} {kind}")) for kind, maker in of_kind.items()}


def task_id(task: Task) -> str:
    """Return the hash of a task without its id."""
    content = {key: value for key, value in task.items() if key != "id"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def tasks(data: Path, seed: int, count: int, measured: Grams) -> Iterator[Task]:
    """Yield `count` turns of the pattern, without tasks that are too long, duplicated or close to a measured prompt."""
    of_kind, ids = makers(data, seed), set[str]()
    pattern = PATTERN.split()
    for number in range(count):
        kind = pattern[number % len(pattern)]
        task = next(of_kind[kind], None)
        if task is None:
            continue
        task = {"kind": kind} | task
        texts = [task.get("text", ""), *(turn.get("text", "") for turn in task.get("turns", ()))]
        task = {"id": task_id(task)} | task
        if max(map(len, texts)) > LONGEST_PROMPT or task["id"] in ids or any(measured & grams(text) for text in texts):
            continue
        ids.add(task["id"])
        yield task


def grams(text: str) -> Grams:
    """Return the runs of `GRAM` words of a text."""
    words = re.findall(r"[a-z0-9]+", text.replace(BOXED, "").lower())
    return {tuple(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1)}


def measured_grams(files: Iterable[Path]) -> Grams:
    """Return the runs of words in all strings of JSON-lines files."""
    found: Grams = set()
    for file in files:
        for row in read_lines(file):
            for text in strings(row):
                found |= grams(text)
    return found


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the public sets that README.md lists")
    parser.add_argument("--measured", type=Path, nargs="*", default=[], help="JSON-lines files not to be trained on")
    parser.add_argument("--out", type=Path, default=Path("build/qwen2.5-coder/prompts.jsonl"))
    parser.add_argument("--count", type=int, default=60_000, help="turns of the pattern")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(words)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = args.out.with_suffix(".part")
    found = list(tasks(args.data, args.seed, args.count, measured_grams(args.measured)))
    unfinished.write_text("".join(json.dumps(task, ensure_ascii=False) + "\n" for task in found), encoding="utf-8")
    unfinished.replace(args.out)
    print(f"{len(found)} tasks in {args.out}")


if __name__ == "__main__":
    main()
