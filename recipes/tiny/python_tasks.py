"""Small Python programming tasks with solutions, for training a tiny language model.

A task is a stub (signature and docstring, sometimes with doctest examples) and a solution (the whole function
without its docstring). Tasks are drawn from FAMILIES, a table of templates: `$a`, `$b`, ... are the arguments,
`$e` and `$f` the loop names for an element of the first and second argument, `$A`, `$B` how the docstring speaks
of an argument, and every other placeholder is a constant that the family declares.
"""

from __future__ import annotations

import builtins
import random
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from keyword import iskeyword
from string import Template, ascii_lowercase
from typing import Any

# --- Values for the examples ------------------------------------------------------------------------------------

WORD_TEXT = (
    "apple river stone cloud green table music level garden silver banana window radar orange paper kayak "
    "tiger lemon bridge Hello World Python sun moon cat dog tea noon light ocean Mars"
)
WORDS = WORD_TEXT.split()
KEYS = ["a", "b", "c", "x", "y", "red", "blue", "green", "tom", "ann"]


def _ints(rng: random.Random) -> list[int]:
    low = rng.choice((0, 1, -5, -10, -20))
    high = rng.choice((6, 10, 20, 50))
    return [rng.randint(low, high) for _ in range(rng.randint(2, 7))]


def _repeats(rng: random.Random) -> list[int]:
    return [rng.randint(1, 5) for _ in range(rng.randint(3, 8))]


def _floats(rng: random.Random) -> list[float]:
    return [rng.randint(0, 40) / 2 for _ in range(rng.randint(2, 5))]


def _words(rng: random.Random) -> list[str]:
    return rng.sample(WORDS, rng.randint(2, 5))


def _sentence(rng: random.Random) -> str:
    return " ".join(rng.sample(WORDS, rng.randint(2, 4)))


def _word(rng: random.Random) -> str:
    return rng.choice(WORDS)


def _mixed(rng: random.Random) -> str:
    return "".join(rng.choice("abcdeXYZ0123456789") for _ in range(rng.randint(3, 8)))


def _brackets(rng: random.Random) -> str:
    return "".join(rng.choice("(())ab") for _ in range(rng.randint(3, 8)))


def _matrix(rng: random.Random, square: bool = False) -> list[list[int]]:
    rows = rng.randint(2, 3)
    columns = rows if square else rng.randint(2, 3)
    return [[rng.randint(0, 9) for _ in range(columns)] for _ in range(rows)]


def _square(rng: random.Random) -> list[list[int]]:
    return _matrix(rng, square=True)


def _dict(rng: random.Random) -> dict[str, int]:
    return {key: rng.randint(-3, 20) for key in rng.sample(KEYS, rng.randint(2, 4))}


def _unique_dict(rng: random.Random) -> dict[str, int]:
    keys = rng.sample(KEYS, rng.randint(2, 4))
    return dict(zip(keys, rng.sample(range(1, 10), len(keys)), strict=True))


def _pairs(rng: random.Random) -> list[tuple[str, int]]:
    return [(key, rng.randint(1, 30)) for key in rng.sample(KEYS, rng.randint(2, 4))]


def _int(low: int, high: int) -> Callable[[random.Random], int]:
    return lambda rng: rng.randint(low, high)


def _from(choices: Sequence[Any]) -> Callable[[random.Random], Any]:
    return lambda rng: rng.choice(choices)


def _anagram(rng: random.Random) -> str:
    return rng.choice(("listen", "silent", "stone", "notes", "tones", "heart", "earth", "hater", "night", "thing"))


@dataclass(frozen=True)
class Kind:
    """A sort of argument: its names, annotation, description and how to draw a value."""

    names: str
    annotation: str
    phrase: str
    sample: Callable[[random.Random], Any]


LIST_NAMES = "numbers values nums items elements lst xs arr integers"
TEXT_NAMES = "text string s sentence phrase line message"
WORD_NAMES = "word text string s name"
MATRIX_NAMES = "matrix grid table m"
DICT_NAMES = "mapping data scores d table counts prices"
N_NAMES = "n number num value x"

KINDS: dict[str, Kind] = {
    "ints": Kind(LIST_NAMES, "list[int]", "list of integers", _ints),
    "repeats": Kind(LIST_NAMES, "list[int]", "list of integers", _repeats),
    "floats": Kind("numbers values nums readings scores prices", "list[float]", "list of numbers", _floats),
    "words": Kind("words strings names tokens terms lst", "list[str]", "list of strings", _words),
    "sentence": Kind(TEXT_NAMES, "str", "string", _sentence),
    "word": Kind(WORD_NAMES, "str", "string", _word),
    "mixed": Kind(TEXT_NAMES, "str", "string", _mixed),
    "brackets": Kind("text string s expression code", "str", "string", _brackets),
    "anagram": Kind("first second left right word other", "str", "word", _anagram),
    "matrix": Kind(MATRIX_NAMES, "list[list[int]]", "matrix", _matrix),
    "square": Kind(MATRIX_NAMES, "list[list[int]]", "square matrix", _square),
    "dict": Kind(DICT_NAMES, "dict[str, int]", "dictionary", _dict),
    "udict": Kind(DICT_NAMES, "dict[str, int]", "dictionary", _unique_dict),
    "pairs": Kind("pairs items entries records lst", "list[tuple[str, int]]", "list of pairs", _pairs),
    "n": Kind(N_NAMES, "int", "integer", _int(1, 12)),
    "big": Kind(N_NAMES, "int", "integer", _int(2, 300)),
    "huge": Kind(N_NAMES, "int", "integer", _int(10, 99999)),
    "any": Kind(N_NAMES, "int", "integer", _int(-30, 60)),
    "first": Kind("a x first left m", "int", "integer", _int(1, 40)),
    "second": Kind("b y second right n", "int", "integer", _int(1, 40)),
    "low": Kind("low lower minimum start", "int", "integer", _int(0, 9)),
    "high": Kind("high upper maximum end", "int", "integer", _int(10, 30)),
    "limit": Kind("limit threshold bound cutoff k", "int", "integer", _int(0, 12)),
    "size": Kind("size length width n k", "int", "integer", _int(1, 4)),
    "steps": Kind("k steps shift n", "int", "integer", _int(1, 4)),
    "times": Kind("times n copies k", "int", "integer", _int(1, 4)),
    "factor": Kind("factor k scale multiplier", "int", "integer", _int(2, 9)),
    "target": Kind("target wanted goal needle", "int", "integer", _int(1, 6)),
    "char": Kind("char letter symbol ch c", "str", "character", _from("aeolnrt")),
    "new": Kind("new replacement other", "str", "character", _from("*-_xz")),
    "sep": Kind("separator sep glue delimiter", "str", "string", _from((", ", "-", " ", "/", "+"))),
    "ending": Kind("ending suffix end tail", "str", "string", _from(("e", "r", "er", "n", "on", "y"))),
    "degrees": Kind("degrees temperature temp value", "float", "temperature", _from((0.0, 10.0, 20.0, 25.0, 100.0))),
    "real": Kind("x number value amount", "float", "number", lambda rng: rng.randint(0, 4000) / 64),
}

SINGULARS = {"lst": "item", "xs": "x", "arr": "item", "entries": "entry", "m": "row", "d": "key"}


def singular(name: str) -> str:
    """Return the loop name for one element of the list `name`."""
    return SINGULARS.get(name, name[:-1] if name.endswith("s") and len(name) > 1 else "part")


# --- Families ---------------------------------------------------------------------------------------------------

Consts = dict[str, Sequence[Any]]


@dataclass(frozen=True)
class Family:
    """Template of one task.

    A text of `docs` that begins with "the" is what the function returns, one that begins with "if" the condition
    it tests; any other is a whole sentence. A key "p,q" of `consts` draws both constants together.
    """

    names: str
    args: str
    returns: str
    docs: tuple[str, ...]
    body: str
    consts: Consts = field(default_factory=dict)
    note: str = ""
    imports: str = ""


SMALL = range(2, 13)
# Name, wording, test and opposite test of a property of an integer.
EVEN_ODD = (("even", "even", "$e % 2 == 0", "$e % 2 != 0"), ("odd", "odd", "$e % 2 != 0", "$e % 2 == 0"))
SIGNS = (("positive", "positive", "$e > 0", "$e <= 0"), ("negative", "negative", "$e < 0", "$e >= 0"))
BOUNDS = (
    ("above_${k}", "greater than $k", "$e > $k", "$e <= $k"),
    ("at_least_${k}", "at least $k", "$e >= $k", "$e < $k"),
    ("multiple_of_${k}", "divisible by $k", "$e % $k == 0", "$e % $k != 0"),
    ("not_multiple_of_${k}", "not divisible by $k", "$e % $k != 0", "$e % $k == 0"),
)
BELOW = (("below_${k}", "less than $k", "$e < $k", "$e >= $k"), ("at_most_${k}", "at most $k", "$e <= $k", "$e > $k"))
PROPERTY: Consts = {"p,prop,test,inverse": EVEN_ODD + SIGNS + BOUNDS + BELOW, "k": SMALL}
FILTER: Consts = {"p,prop,test,inverse": EVEN_ODD + SIGNS[1:] + BOUNDS + BELOW, "k": SMALL}
QUANTIFIED: Consts = {"p,prop,test,inverse": EVEN_ODD + SIGNS + BOUNDS, "k": SMALL}
EXTREME: Consts = {
    "ext,word,op": (("max", "largest", ">"), ("min", "smallest", "<")),
}
# Name, wording and test of a property of a character.
CHAR_CLASS: Consts = {
    "p,prop,test": (
        ("digits", "digits", "char.isdigit()"),
        ("letters", "letters", "char.isalpha()"),
        ("uppercase", "uppercase letters", "char.isupper()"),
        ("lowercase", "lowercase letters", "char.islower()"),
    ),
}

LIST_FAMILIES = [
    Family("sum_$p total_$p add_up_$p ${p}_sum", "ints", "int",
           ("the sum of all numbers in $A that are $prop", "Add up the numbers in $A that are $prop."),
           """
           total = 0
           for $e in $a:
               if $test:
                   total += $e
           return total
           """, PROPERTY, "If there is no such number the result is 0."),
    Family("count_$p how_many_$p number_of_$p", "ints", "int",
           ("the number of elements of $A that are $prop", "Count how many numbers in $A are $prop."),
           """
           count = 0
           for $e in $a:
               if $test:
                   count += 1
           return count
           """, PROPERTY),
    Family("keep_$p select_$p only_$p filter_$p", "ints", "list[int]",
           ("the elements of $A that are $prop", "Keep only the numbers of $A that are $prop."),
           "return [$e for $e in $a if $test]", FILTER, "The order is kept."),
    Family("drop_$p remove_$p without_$p", "ints", "list[int]",
           ("the list $a without the numbers that are $prop", "Remove from $A every number that is $prop."),
           "return [$e for $e in $a if $inverse]", FILTER),
    Family("all_$p are_all_$p only_has_$p", "ints", "bool", ("if every number in $A is $prop",),
           """
           for $e in $a:
               if $inverse:
                   return False
           return True
           """, QUANTIFIED),
    Family("any_$p has_$p contains_$p", "ints", "bool", ("if at least one number in $A is $prop",),
           """
           for $e in $a:
               if $test:
                   return True
           return False
           """, PROPERTY),
    Family("first_$p find_first_$p position_of_$p", "ints", "int",
           ("the index of the first element of $A that is $prop, or -1 if there is none",),
           """
           for i in range(len($a)):
               $e = $a[i]
               if $test:
                   return i
           return -1
           """, PROPERTY),
    Family("${ext}_$p ${word}_$p find_${word}_$p", "ints", "int",
           ("the $word number in $A that is $prop, or 0 if there is none",),
           """
           found = [$e for $e in $a if $test]
           if not found:
               return 0
           return ${ext}(found)
           """, {**PROPERTY, **EXTREME}),
    Family("product_$p multiply_$p", "ints", "int", ("the product of all numbers in $A that are $prop",),
           """
           result = 1
           for $e in $a:
               if $test:
                   result *= $e
           return result
           """, PROPERTY, "The product of no numbers is 1."),
    Family("scale multiply_all times_each scaled", "ints factor", "list[int]",
           ("the list of all elements of $A multiplied by $B", "Multiply every element of $A by $b."),
           "return [$e * $b for $e in $a]"),
    Family("${verb}_each_$k ${verb}_all_${k}", "ints", "list[int]", ("$Verb every number in $A $by $k.",),
           "return [$e $op $k for $e in $a]",
           {"verb,Verb,by,op": (("multiply", "Multiply", "by", "*"), ("divide", "Divide", "without remainder by", "//"),
                                ("reduce", "Reduce", "by", "-")), "k": SMALL}),
    Family("position_of_$ext index_of_$word ${word}_index", "ints", "int", ("the index of the $word element of $A",),
           """
           best = 0
           for i in range(len($a)):
               if $a[i] $op $a[best]:
                   best = i
           return best
           """, EXTREME, "If it occurs more than once, use the first index."),
    Family("spread value_range max_minus_min", "ints", "int",
           ("the difference between the largest and the smallest number in $A",), "return max($a) - min($a)"),
    Family("deduplicate drop_repeats dedupe distinct_in_order", "repeats", "list[int]",
           ("the elements of $A with repeated values kept only once, in order of first occurrence",),
           """
           result = []
           for $e in $a:
               if $e not in result:
                   result.append($e)
           return result
           """),
    Family("reversed_list backwards reverse_list turn_around", "ints", "list[int]",
           ("the elements of $A in reverse order", "Reverse $A."), "return $a[::-1]"),
    Family("rotate_$dir shift_$dir cycle_$dir", "ints steps", "list[int]",
           ("Rotate $A to the $dir by $b positions.", "the list $a rotated to the $dir by $b places"),
           """
           if not $a:
               return []
           $b = $b % len($a)
           return $cut
           """, {"dir,cut": (("left", "$a[$b:] + $a[:$b]"), ("right", "$a[-$b:] + $a[:-$b]"))}),
    Family("chunk split_into_chunks in_groups batches", "ints size", "list[list[int]]",
           ("Split $A into consecutive chunks of $b elements.", "the consecutive pieces of $A of length $b"),
           """
           result = []
           for i in range(0, len($a), $b):
               result.append($a[i:i + $b])
           return result
           """, {}, "The last one may be shorter."),
    Family("flatten flatten_rows join_lists to_flat_list", "matrix", "list[int]",
           ("the list of all numbers in $A, row by row", "Flatten the nested list $a into a single list."),
           """
           result = []
           for row in $a:
               for cell in row:
                   result.append(cell)
           return result
           """),
    Family("adjacent_pairs neighbours consecutive_pairs", "ints", "list[tuple[int, int]]",
           ("the list of pairs of neighbouring elements of $A",),
           """
           result = []
           for i in range(len($a) - 1):
               result.append(($a[i], $a[i + 1]))
           return result
           """),
    Family("count_pairs_$k pairs_with_sum_${k}", "ints", "int",
           ("the number of pairs of elements of $A at different positions whose sum is $k",),
           """
           count = 0
           for i in range(len($a)):
               for j in range(i + 1, len($a)):
                   if $a[i] + $a[j] == $k:
                       count += 1
           return count
           """, {"k": range(2, 16)}),
    Family("second_largest runner_up second_biggest", "ints", "int",
           ("the second largest distinct number in $A, or -1 if there is none",),
           """
           ordered = sorted(set($a))
           if len(ordered) < 2:
               return -1
           return ordered[-2]
           """),
    Family("running_totals cumulative_sum partial_sums", "ints", "list[int]",
           ("the list of running totals of $A", "For each position of $A give the sum of all numbers up to it."),
           """
           result = []
           total = 0
           for $e in $a:
               total += $e
               result.append(total)
           return result
           """),
    Family("differences gaps step_sizes deltas", "ints", "list[int]",
           ("the differences between each element of $A and the one before it",),
           """
           result = []
           for i in range(1, len($a)):
               result.append($a[i] - $a[i - 1])
           return result
           """),
    Family("find_index index_or_minus_one locate", "repeats target", "int",
           ("the index of the first occurrence of $b in $A, or -1 if it does not occur",),
           """
           for i in range(len($a)):
               if $a[i] == $b:
                   return i
           return -1
           """),
    Family("all_positions find_all indices_of", "repeats target", "list[int]",
           ("the list of all indices at which $b occurs in $A",),
           """
           result = []
           for i in range(len($a)):
               if $a[i] == $b:
                   result.append(i)
           return result
           """),
    Family("count_occurrences times_present count_equal", "repeats target", "int",
           ("the number of times $b occurs in $A", "Count how often $b appears in $A."),
           """
           count = 0
           for $e in $a:
               if $e == $b:
                   count += 1
           return count
           """),
    Family("average mean_value arithmetic_mean", "floats", "float",
           ("the average of $A, or 0.0 if it is empty", "Compute the mean of $A. An empty list has mean 0.0."),
           """
           if not $a:
               return 0.0
           return sum($a) / len($a)
           """),
    Family("every_$nth take_every_$nth", "ints", "list[int]",
           ("the list of every $nth element of $A, starting with the first",), "return $a[::$k]",
           {"nth,k": (("second", 2), ("third", 3), ("fourth", 4))}),
    Family("${end}_$k take_${end}_${k}", "ints", "list[int]", ("the $end $k elements of $A",), "return $a[$cut]",
           {"end,cut": (("first", ":$k"), ("last", "-$k:")), "k": range(2, 6)},
           "A shorter list is returned unchanged."),
    Family("sum_of_$p add_$p total_of_$p", "ints", "int", ("the sum of the $prop of the numbers in $A",),
           """
           total = 0
           for $e in $a:
               total += $term
           return total
           """, {"p,prop,term": (("cubes", "cubes", "$e ** 3"), ("absolutes", "absolute values", "abs($e)"),
                                 ("doubles", "doubles", "2 * $e"), ("halves", "whole halves", "$e // 2"))}),
    Family("dot_product scalar_product sum_of_products", "ints ints", "int",
           ("the sum of the products of the elements of $a and $b at equal positions",),
           """
           total = 0
           for $e, $f in zip($a, $b):
               total += $e * $f
           return total
           """),
    Family("${verb}_pairwise pairwise_$verb", "ints ints", "list[int]",
           ("the list of the ${what}s of the elements of $a and $b at equal positions",),
           "return [$term for $e, $f in zip($a, $b)]",
           {"verb,what,term": (("sum", "sum", "$e + $f"), ("product", "product", "$e * $f"),
                               ("maximum", "maximum", "max($e, $f)"), ("minimum", "minimum", "min($e, $f)"))}),
    Family("count_peaks number_of_peaks local_maxima", "ints", "int",
           ("the number of elements of $A that are greater than both neighbours",),
           """
           count = 0
           for i in range(1, len($a) - 1):
               if $a[i] > $a[i - 1] and $a[i] > $a[i + 1]:
                   count += 1
           return count
           """),
    Family("count_rises steps_up count_increases", "ints", "int",
           ("Count how often an element of $A is greater than the one before it.",),
           """
           count = 0
           for i in range(1, len($a)):
               if $a[i] > $a[i - 1]:
                   count += 1
           return count
           """),
    Family("has_repeats any_repeated has_duplicates", "repeats", "bool", ("if some value occurs twice in $A",),
           "return len(set($a)) < len($a)"),
    Family("sort_descending largest_first high_to_low", "ints", "list[int]",
           ("the elements of $A from the largest to the smallest",), "return sorted($a, reverse=True)"),
    Family("cap_at_$k limit_to_${k}", "ints", "list[int]", ("Replace every number in $A greater than $k by $k.",),
           "return [min($e, $k) for $e in $a]", {"k": range(3, 20)}),
]

STRING_FAMILIES = [
    Family("count_consonants consonant_count", "sentence", "int",
           ("the number of consonants in $A", "Count the letters of $A that are not one of a, e, i, o, u."),
           """
           count = 0
           for char in $a.lower():
               if char.isalpha() and char not in "aeiou":
                   count += 1
           return count
           """),
    Family("hide_vowels mask_vowels vowels_to_symbol", "sentence", "str",
           ("Replace every vowel in $A by '$s'.", "the string $a with each vowel replaced by '$s'"),
           """
           result = ""
           for char in $a:
               if char.lower() in "aeiou":
                   result += "$s"
               else:
                   result += char
           return result
           """, {"s": "*-_#.?"}),
    Family("starts_with_vowel begins_with_vowel", "words", "list[str]",
           ("the words of $A that begin with a vowel",),
           "return [$e for $e in $a if $e[0].lower() in \"aeiou\"]"),
    Family("count_palindromes palindrome_words number_of_mirror_words", "sentence", "int",
           ("the number of words in $A that read the same forwards and backwards",),
           """
           count = 0
           for word in $a.split():
               if word == word[::-1]:
                   count += 1
           return count
           """),
    Family("reverse_words words_backwards flip_word_order", "sentence", "str",
           ("the words of $A in reverse order, separated by spaces", "Reverse the order of the words in $A."),
           """
           words = $a.split()
           return " ".join(words[::-1])
           """),
    Family("reverse_each_word mirror_words", "sentence", "str",
           ("Reverse the letters of each word in $A but keep the order of the words.",),
           """
           words = [word[::-1] for word in $a.split()]
           return " ".join(words)
           """),
    Family("capitalise_words capitalize_words title_words", "sentence", "str",
           ("Write the first letter of each word in $A as a capital.",),
           """
           words = [word[0].upper() + word[1:] for word in $a.split()]
           return " ".join(words)
           """),
    Family("count_char char_count occurrences count_letter", "sentence char", "int",
           ("the number of times $b occurs in $A", "Count how often the character $b appears in $A."),
           """
           count = 0
           for item in $a:
               if item == $b:
                   count += 1
           return count
           """),
    Family("remove_char drop_char without_char delete_letter", "sentence char", "str",
           ("the string $a without the character $b", "Remove every $b from $A."),
           """
           result = ""
           for item in $a:
               if item != $b:
                   result += item
           return result
           """),
    Family("replace_char swap_char change_letter", "sentence char new", "str",
           ("Replace every $b in $A by $c.", "the string $a with each $b changed to $c"),
           """
           result = ""
           for item in $a:
               if item == $b:
                   result += $c
               else:
                   result += item
           return result
           """),
    Family("count_with_ending count_ending words_ending", "words ending", "int",
           ("the number of strings in $A that end with $b",),
           """
           count = 0
           for $e in $a:
               if $e.endswith($b):
                   count += 1
           return count
           """),
    Family("keep_with_ending select_ending ending_in", "words ending", "list[str]",
           ("the strings in $A that end with $b",), "return [$e for $e in $a if $e.endswith($b)]"),
    Family("add_$where attach_$where put_$where", "words", "list[str]",
           ("Add '$s' to the $end of every string in $A.",),
           "return [$term for $e in $a]",
           {"where,end,term": (("prefix", "beginning", '"$s" + $e'), ("suffix", "end", '$e + "$s"')),
            "s": ("-", "x", "un", "re", "!", "_", "ing", "s")}),
    Family("cut_$where strip_$where trim_$where", "word", "str",
           ("Remove '$s' from the $end of $A if it is there.",),
           """
           if $a.${test}("$s"):
               return $a[$cut]
           return $a
           """,
           {"where,end,test,cut": (("prefix", "beginning", "startswith", 'len("$s"):'),
                                   ("suffix", "end", "endswith", ':-len("$s")')),
            "s": ("t", "l", "n", "r", "re", "er", "le", "on")}),
    Family("caesar shift_letters rotate_letters cipher", "word", "str",
           ("Shift every letter of $A by $k places $where in the alphabet.",),
           """
           result = ""
           for char in $a.lower():
               index = (ord(char) - ord("a") $op $k) % 26
               result += chr(ord("a") + index)
           return result
           """, {"where,op": (("forward", "+"), ("back", "-")), "k": (1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 13)},
           "The result is in lower case."),
    Family("is_anagram are_anagrams same_letters", "anagram anagram", "bool",
           ("if $a and $b are made of the same letters, each used equally often", "if $a is an anagram of $b"),
           "return sorted($a) == sorted($b)"),
    Family("${word}_word_length length_of_$word", "sentence", "int",
           ("the length of the $word word in $A, or 0 if it has no words",),
           """
           lengths = [len(word) for word in $a.split()]
           if not lengths:
               return 0
           return ${ext}(lengths)
           """, {"word,ext": (("longest", "max"), ("shortest", "min"))}),
    Family("last_longest_word longest_in_sentence final_longest", "sentence", "str",
           ("the longest word in $A; of several equally long ones the last",),
           """
           best = ""
           for word in $a.split():
               if len(word) >= len(best):
                   best = word
           return best
           """),
    Family("join_strings glue_together join_with", "words sep", "str",
           ("Join the strings in $A with $b between them.",), "return $b.join($a)"),
    Family("repeat_text repeat_string copies_of", "word times", "str",
           ("the string $a repeated $b times", "Repeat $A $b times."), "return $a * $b"),
    Family("repeat_chars stretch repeat_each", "word times", "str", ("Repeat each character of $A $b times.",),
           """
           result = ""
           for item in $a:
               result += item * $b
           return result
           """),
    Family("strip_$p remove_$p without_$p", "mixed", "str", ("the string $a without its $prop",
                                                             "Remove all $prop from $A."),
           """
           result = ""
           for char in $a:
               if not $test:
                   result += char
           return result
           """, CHAR_CLASS),
    Family("keep_$p only_$p extract_$p", "mixed", "str", ("the $prop of $A as a string", "Keep only the $prop of $A."),
           """
           result = ""
           for char in $a:
               if $test:
                   result += char
           return result
           """, CHAR_CLASS),
    Family("count_$p number_of_$p how_many_$p", "mixed", "int", ("the number of $prop in $A",),
           """
           count = 0
           for char in $a:
               if $test:
                   count += 1
           return count
           """, CHAR_CLASS),
    Family("sum_of_digit_chars add_digits_in digit_total", "mixed", "int", ("the sum of all digits in $A",),
           """
           total = 0
           for char in $a:
               if char.isdigit():
                   total += int(char)
           return total
           """),
    Family("alternate_case wave_case zigzag_case", "word", "str",
           ("Write the characters of $A in turn in $one case and $two case, beginning with $one case.",),
           """
           result = ""
           for i in range(len($a)):
               if i % 2 == 0:
                   result += $a[i].$one()
               else:
                   result += $a[i].$two()
           return result
           """, {"one,two": (("upper", "lower"), ("lower", "upper"))}),
    Family("to_$case all_$case make_$case", "words", "list[str]", ("Write every string in $A in $case case.",),
           "return [$e.$case() for $e in $a]", {"case": ("upper", "lower")}),
    Family("word_lengths lengths_of_words", "sentence", "list[int]", ("the list of the lengths of the words in $A",),
           "return [len(word) for word in $a.split()]"),
    Family("count_words_$p words_$p", "sentence", "int", ("the number of words in $A with $prop characters",),
           """
           count = 0
           for word in $a.split():
               if len(word) $op $k:
                   count += 1
           return count
           """, {"p,prop,op": (("longer_than_${k}", "more than $k", ">"), ("shorter_than_${k}", "fewer than $k", "<"),
                               ("of_length_${k}", "exactly $k", "==")), "k": range(3, 8)}),
    Family("initials first_letters acronym", "sentence", "str", ("the first letters of the words in $A as a string",),
           """
           result = ""
           for word in $a.split():
               result += word[0]
           return result
           """),
    Family("pad_$where fill_$where align_$where", "word", "str",
           ("Add '$s' at the $where of $A until it has $k characters.",),
           """
           while len($a) < $k:
               $a = $term
           return $a
           """, {"where,term": (("left", '"$s" + $a'), ("right", '$a + "$s"')), "s": "0*-._", "k": range(6, 11)}),
    Family("compress squeeze collapse_runs", "mixed", "str",
           ("Replace every run of equal characters in $A by a single character.",),
           """
           result = ""
           for char in $a:
               if not result or result[-1] != char:
                   result += char
           return result
           """),
]

NUMBER_FAMILIES = [
    Family("factorial product_up_to multiply_to", "n", "int",
           ("the factorial of $a", "the product of all integers from 1 to $a"),
           """
           result = 1
           for i in range(2, $a + 1):
               result *= i
           return result
           """),
    Family("lcm least_common_multiple smallest_shared_multiple", "first second", "int",
           ("the smallest positive integer that both $a and $b divide",),
           """
           result = max($a, $b)
           while result % $a != 0 or result % $b != 0:
               result += 1
           return result
           """),
    Family("are_coprime coprime no_shared_factor", "first second", "bool",
           ("if $a and $b have no common divisor except 1",),
           """
           while $b != 0:
               $a, $b = $b, $a % $b
           return $a == 1
           """),
    Family("shared_divisors common_factors divide_both", "first second", "list[int]",
           ("the list of all positive integers that divide both $a and $b",),
           """
           result = []
           for i in range(1, min($a, $b) + 1):
               if $a % i == 0 and $b % i == 0:
                   result.append(i)
           return result
           """),
    Family("next_prime prime_after following_prime", "big", "int", ("the smallest prime number greater than $a",),
           """
           candidate = $a + 1
           while True:
               if all(candidate % i != 0 for i in range(2, candidate)):
                   return candidate
               candidate += 1
           """),
    Family("smallest_factor least_prime_factor", "big", "int",
           ("the smallest divisor of $a that is greater than 1",),
           """
           factor = 2
           while $a % factor != 0:
               factor += 1
           return factor
           """),
    Family("fibonacci_up_to fibonacci_list fibonacci_below", "big", "list[int]",
           ("the list of the Fibonacci numbers less than $a, starting with 0 and 1",),
           """
           result = []
           current, following = 0, 1
           while current < $a:
               result.append(current)
               current, following = following, current + following
           return result
           """),
    Family("${p}_of_digits digit_$p", "huge", "int", ("the $p of the decimal digits of $a",),
           """
           result = $zero
           for digit in str($a):
               result $op int(digit)
           return result
           """, {"p,zero,op": (("sum", 0, "+="), ("product", 1, "*="))}),
    Family("count_digit_$k digit_${k}_count", "huge", "int", ("Count how often the digit $k occurs in $a.",),
           """
           count = 0
           while $a > 0:
               if $a % 10 == $k:
                   count += 1
               $a = $a // 10
           return count
           """, {"k": range(1, 10)}),
    Family("reverse_number digits_backwards mirror_number", "huge", "int",
           ("the number whose digits are those of $a in reverse order",),
           """
           result = 0
           while $a > 0:
               result = result * 10 + $a % 10
               $a = $a // 10
           return result
           """),
    Family("power_of to_the_power raise_to", "n size", "int", ("Raise $a to the power $b by repeated multiplication.",),
           """
           result = 1
           for i in range($b):
               result *= $a
           return result
           """),
    Family("divisors factors all_divisors", "big", "list[int]",
           ("the list of all positive divisors of $a in ascending order",),
           "return [i for i in range(1, $a + 1) if $a % i == 0]"),
    Family("count_divisors number_of_factors", "big", "int", ("the number of positive divisors of $a",),
           """
           count = 0
           for i in range(1, $a + 1):
               if $a % i == 0:
                   count += 1
           return count
           """),
    Family("is_perfect_square is_square_number", "big", "bool", ("if $a is the square of an integer",),
           """
           root = math.isqrt($a)
           return root * root == $a
           """, imports="import math"),
    Family("hypotenuse diagonal_length", "first second", "float",
           ("the length of the diagonal of a rectangle with sides $a and $b, rounded to $k decimals",),
           "return round(math.sqrt($a * $a + $b * $b), $k)", {"k": (1, 2, 3)}, imports="import math"),
    Family("clamp limit_value keep_between", "any low high", "int",
           ("the value of $a limited to the range from $b to $c",),
           """
           if $a < $b:
               return $b
           if $a > $c:
               return $c
           return $a
           """),
    Family("is_between in_range lies_between", "any low high", "bool", ("if $a lies between $b and $c, ends included",),
           "return $b <= $a <= $c"),
    Family("$name", "degrees", "float", ("Convert $A from $from_ to $to.",), "return $term",
           {"name,from_,to,term": (
               ("celsius_to_fahrenheit", "Celsius", "Fahrenheit", "$a * 9 / 5 + 32"),
               ("to_fahrenheit", "degrees Celsius", "degrees Fahrenheit", "$a * 9 / 5 + 32"),
               ("fahrenheit_to_celsius", "Fahrenheit", "Celsius", "($a - 32) * 5 / 9"),
               ("celsius_to_kelvin", "Celsius", "kelvin", "$a + 273.15"))}),
    Family("round_to_$k round_$k rounded_${k}", "real", "float", ("Round $A to $k decimal places.",),
           "return round($a, $k)", {"k": (1, 2, 3)}),
    Family("round_$where to_multiple_$where", "big", "int",
           ("Round $A $where to a multiple of $k.",), "return $term",
           {"where,term": (("down", "$a // $k * $k"), ("up", "($a + $k - 1) // $k * $k")), "k": range(3, 26)}),
    Family("padded_binary binary_$k to_bits", "n", "str",
           ("the binary digits of $a, filled up with zeros on the left to $k digits",),
           """
           result = ""
           while $a > 0:
               result = str($a % 2) + result
               $a = $a // 2
           while len(result) < $k:
               result = "0" + result
           return result
           """, {"k": range(4, 9)}),
    Family("count_${word}_bits ${word}_bits", "big", "int", ("the number of binary digits of $a that are $k",),
           """
           count = 0
           while $a > 0:
               if $a % 2 == $k:
                   count += 1
               $a = $a // 2
           return count
           """, {"word,k": (("one", 1), ("zero", 0))}),
    Family("collatz_steps steps_to_one hailstone_length", "n", "int",
           ("Count the Collatz steps from $a to 1: halve an even number, triple an odd one and add 1.",),
           """
           steps = 0
           while $a != 1:
               if $a % 2 == 0:
                   $a = $a // 2
               else:
                   $a = 3 * $a + 1
               steps += 1
           return steps
           """),
    Family("sum_of_multiples add_multiples_of_${k}", "big", "int",
           ("the sum of all multiples of $k from 1 to $a",),
           """
           total = 0
           for i in range(1, $a + 1):
               if i % $k == 0:
                   total += i
           return total
           """, {"k": SMALL}),
    Family("multiples first_multiples multiples_of", "factor size", "list[int]",
           ("the list of the first $b multiples of $a",), "return [$a * i for i in range(1, $b + 1)]"),
    Family("sign sign_of signum", "any", "int", ("Return 1 if $a is positive, -1 if it is negative, and 0 otherwise.",),
           """
           if $a > 0:
               return 1
           if $a < 0:
               return -1
           return 0
           """),
    Family("is_leap_year leap_year", "year", "bool",
           ("if $a is a leap year: divisible by 4, but not by 100 unless also by 400",),
           """
           if $a % 400 == 0:
               return True
           if $a % 100 == 0:
               return False
           return $a % 4 == 0
           """),
    Family("${one}_or_$two label_$one name_$one", "n", "str",
           ("Return '$one' if $a is divisible by $k and '$two' otherwise.",),
           """
           if $a % $k == 0:
               return "$one"
           return "$two"
           """, {"one,two": (("yes", "no"), ("tick", "tock"), ("red", "blue"), ("on", "off")), "k": range(2, 6)}),
    Family("countdown count_down down_from", "n", "list[int]", ("the list of the integers from $a down to $k",),
           "return list(range($a, $stop, -1))", {"k,stop": ((1, 0), (0, -1))}),
    Family("minutes_and_seconds split_seconds", "huge", "tuple[int, int]",
           ("Convert $a $small to a pair of full $big and remaining $small.",), "return ($a // $k, $a % $k)",
           {"small,big,k": (("seconds", "minutes", 60), ("minutes", "hours", 60), ("hours", "days", 24),
                            ("days", "weeks", 7), ("eggs", "dozens", 12))}),
]
KINDS["year"] = Kind("year y n", "int", "year", _from((1900, 1996, 2000, 2001, 2019, 2020, 2023, 2024, 2100, 2400)))

COLLECTION_FAMILIES = [
    Family("invert swap_keys_and_values invert_dict", "udict", "dict[int, str]",
           ("the dictionary that maps each value of $a to its key", "Swap the keys and values of $A."),
           """
           result = {}
           for key, value in $a.items():
               result[value] = key
           return result
           """),
    Family("count_frequencies frequencies tally count_each", "repeats", "dict[int, int]",
           ("the dictionary that maps each element of $a to the number of times it occurs",),
           """
           result = {}
           for $e in $a:
               result[$e] = result.get($e, 0) + 1
           return result
           """),
    Family("char_frequencies letter_counts tally_letters", "word", "dict[str, int]",
           ("Count how often each character occurs in $A.",),
           """
           result = {}
           for char in $a:
               result[char] = result.get(char, 0) + 1
           return result
           """),
    Family("merge_dicts merge combine_counts add_dicts", "dict dict", "dict[str, int]",
           ("Merge $a and $b. $clause",),
           """
           result = dict($a)
           for key, value in $b.items():
               result[key] = $term
           return result
           """,
           {"clause,term": (("A key in both gets the value of $b", "value"),
                            ("The values of a key in both are added", "result.get(key, 0) + value"),
                            ("A key in both gets the larger value", "max(value, result.get(key, value))"))}),
    Family("group_by_$p collect_by_$p grouped_by_$p", "words", "dict[$type, list[str]]",
           ("Group the strings in $A by their $prop.",),
           """
           result = {}
           for $e in $a:
               key = $term
               if key not in result:
                   result[key] = []
               result[key].append($e)
           return result
           """, {"p,prop,term,type": (("length", "length", "len($e)", "int"),
                                      ("initial", "first letter", "$e[0]", "str"),
                                      ("last_letter", "last letter", "$e[-1]", "str"))}),
    Family("key_of_$ext key_with_$ext $word", "udict", "str", ("the key of $a with the $word value",),
           """
           best = ""
           for key in $a:
               if best == "" or $a[key] $op $a[best]:
                   best = key
           return best
           """, EXTREME),
    Family("keys_with_max keys_of_maximum best_keys", "dict", "list[str]",
           ("the list of all keys of $a that have the largest value",),
           """
           highest = max($a.values())
           return [key for key, value in $a.items() if value == highest]
           """),
    Family("keys_$p select_keys_$p", "dict", "list[str]", ("the keys of $a whose value is $prop $k",),
           "return [key for key, value in $a.items() if value $op $k]",
           {"p,prop,op": (("above_${k}", "greater than", ">"), ("below_${k}", "less than", "<")), "k": SMALL}),
    Family("sum_values total_value add_values", "dict", "int", ("the sum of all values of $a",),
           """
           total = 0
           for value in $a.values():
               total += value
           return total
           """),
    Family("length_table map_to_length word_sizes", "words", "dict[str, int]",
           ("the dictionary that maps each string in $a to its length",), "return {$e: len($e) for $e in $a}"),
    Family("squares_table square_dict", "size", "dict[int, int]",
           ("the dictionary that maps each integer from 1 to $a to its $word",),
           "return {i: i ** $k for i in range(1, $a + 1)}", {"word,k": (("square", 2), ("cube", 3))}),
    Family("to_dict pairs_to_dict dict_from_pairs", "pairs", "dict[str, int]",
           ("the dictionary made of the pairs in $a",),
           """
           result = {}
           for key, value in $a:
               result[key] = value
           return result
           """),
    Family("shared_in_order present_in_both also_in", "repeats repeats", "list[int]",
           ("the elements of $a that also occur in $b, in the order of $a",),
           "return [$e for $e in $a if $e in $b]"),
    Family("missing_from not_in_second only_in_first", "repeats repeats", "list[int]",
           ("the elements of $a that do not occur in $b",), "return [$e for $e in $a if $e not in $b]"),
    Family("are_disjoint nothing_shared no_overlap", "ints ints", "bool", ("if $a and $b have no element in common",),
           """
           for $e in $a:
               if $e in $b:
                   return False
           return True
           """),
    Family("count_distinct distinct_count different_values", "repeats", "int",
           ("the number of different values in $A",), "return len(set($a))"),
    Family("min_and_max smallest_and_largest extremes", "ints", "tuple[int, int]",
           ("the pair of the smallest and the largest number in $A",), "return (min($a), max($a))"),
    Family("split_at_$k partition_${k}", "ints", "tuple[list[int], list[int]]",
           ("Split $A into the numbers less than $k and the others, and return both lists.",),
           """
           below = [$e for $e in $a if $e < $k]
           others = [$e for $e in $a if $e >= $k]
           return (below, others)
           """, {"k": SMALL}),
    Family("number_items with_index enumerate_from_${k}", "words", "list[tuple[int, str]]",
           ("the list of pairs of a running number, starting at $k, and each string in $a",),
           """
           result = []
           for i in range(len($a)):
               result.append((i + $k, $a[i]))
           return result
           """, {"k": (1, 2, 5, 10)}),
    Family("transpose flip_matrix columns", "matrix", "list[list[int]]",
           ("the matrix $a with rows and columns exchanged", "Transpose $A."),
           """
           result = []
           for j in range(len($a[0])):
               result.append([row[j] for row in $a])
           return result
           """),
    Family("row_$name each_row_$name ${name}_by_row", "matrix", "list[int]",
           ("the list of the $prop of each row of $a",), "return [$func(row) for row in $a]",
           {"name,prop,func": (("sums", "sum", "sum"), ("maxima", "largest number", "max"),
                               ("minima", "smallest number", "min"))}),
    Family("column_$name ${name}_by_column", "matrix", "list[int]", ("the list of the $prop of each column of $a",),
           """
           result = []
           for j in range(len($a[0])):
               result.append($func([row[j] for row in $a]))
           return result
           """, {"name,prop,func": (("sums", "sum", "sum"), ("maxima", "largest number", "max"))}),
    Family("${p}diagonal get_${p}diagonal", "square", "list[int]",
           ("the numbers on the diagonal of $a from the top $side to the bottom $other",),
           "return [$a[i][$index] for i in range(len($a))]",
           {"p,side,other,index": (("", "left", "right", "i"), ("anti_", "right", "left", "len($a) - 1 - i"))}),
    Family("count_cells_$k cells_above_${k}", "matrix", "int", ("the number of entries of $a greater than $k",),
           """
           count = 0
           for row in $a:
               for cell in row:
                   if cell > $k:
                       count += 1
           return count
           """, {"k": range(1, 8)}),
    Family("sort_by_$p order_by_$p", "words", "list[str]", ("Sort the strings in $A by their $prop.",),
           "return sorted($a, key=lambda $e: $term)",
           {"p,prop,term": (("length", "length", "len($e)"), ("last_letter", "last letter", "$e[-1]"),
                            ("lowercase", "lower case form", "$e.lower()"))}),
    Family("sort_pairs_by_$p pairs_by_$p", "pairs", "list[tuple[str, int]]",
           ("Sort the pairs in $A by their $p element$tail.",), "return sorted($a, key=lambda $e: $e[$i]$more)",
           {"p,i": (("first", 0), ("second", 1)),
            "tail,more": (("", ""), (", the largest first", ", reverse=True"))}),
    Family("sort_by_$p order_by_$p", "ints", "list[int]", ("Sort the numbers in $A by their $prop.",),
           "return sorted($a, key=lambda $e: $term)",
           {"p,prop,term": (("last_digit", "last digit", "abs($e) % 10"), ("absolute", "absolute value", "abs($e)"),
                            ("remainder", "remainder on division by $k", "$e % $k"),
                            ("distance", "distance from $k", "abs($e - $k)")), "k": SMALL}),
    Family("valid_$name is_valid_$name good_$name", "mixed", "bool",
           ("if $A has at least $k characters and contains a digit",),
           """
           if len($a) < $k:
               return False
           for char in $a:
               if char.isdigit():
                   return True
           return False
           """, {"name": ("password", "code", "key", "token"), "k": range(4, 8)}),
    Family("is_identifier_like only_allowed uses_allowed", "mixed", "bool",
           ("if every character of $A is $prop",),
           """
           for char in $a:
               if not ($test):
                   return False
           return True
           """,
           {"prop,test": (("a letter or a digit below $k", 'char.isalpha() or char in "0123456789"[:$k]'),
                          ("lower case or a digit", "char.islower() or char.isdigit()"),
                          ("upper case or a digit", "char.isupper() or char.isdigit()")), "k": range(5, 10)}),
    Family("count_unclosed unclosed_brackets still_open", "brackets", "int",
           ("the number of opening parentheses in $A that are never closed",),
           """
           depth = 0
           for char in $a:
               if char == "(":
                   depth += 1
               elif char == ")" and depth > 0:
                   depth -= 1
           return depth
           """),
    Family("text_outside outside_brackets drop_bracketed", "brackets", "str",
           ("the characters of $A that are neither '(' nor ')'", "Remove the parentheses from $A."),
           """
           result = ""
           for char in $a:
               if char not in "()":
                   result += char
           return result
           """),
]

FAMILIES: list[Family] = [*LIST_FAMILIES, *STRING_FAMILIES, *NUMBER_FAMILIES, *COLLECTION_FAMILIES]

# --- Drawing a task ---------------------------------------------------------------------------------------------

NOUN_OPENERS = ("Return", "Return", "Compute", "Find", "Determine", "This function returns")
TEST_OPENERS = ("Return True if", "Check if", "Check whether", "Return whether", "Decide whether", "Test if")


def fill(template: str, names: dict[str, str]) -> str:
    """Substitute placeholders until none is left (constants may hold placeholders themselves)."""
    while "$" in template:
        template = Template(template).substitute(names)
    return template


def draw_constants(rng: random.Random, family: Family) -> dict[str, str]:
    drawn: dict[str, str] = {}
    for key, choices in family.consts.items():
        choice = rng.choice(choices)
        parts = choice if "," in key else (choice,)
        drawn.update(zip(key.split(","), map(str, parts), strict=True))
    return drawn


def odd_name(rng: random.Random, taken: set[str]) -> str:
    """Return an unused name without meaning: a letter, made-up syllables, or two words."""
    parts = ("bcdfghjklmnpqrstvwxyz", "aeiou", ("", "", "n", "r", "s"))
    while True:
        made = "".join(rng.choice(letters) for letters in parts * rng.randint(1, 3))
        pieces = [rng.choice(WORDS).lower(), made]
        name = rng.choice((rng.choice(ascii_lowercase), pieces[0], made, made, "_".join(rng.sample(pieces, 2))))
        if name not in taken and not iskeyword(name) and not hasattr(builtins, name):
            return name


def draw_arguments(
    rng: random.Random, family: Family, kinds: list[Kind], constants: dict[str, str], odd: float
) -> dict[str, str]:
    """Draw names for the arguments and their elements that clash with nothing else in the body."""
    text = " ".join([family.body, *constants.values()])
    taken = set(re.findall(r"(?<![$\w])[a-z_]+", text))
    drawn: dict[str, str] = {}
    for letter, element, kind in zip("abc", "efg", kinds, strict=False):
        if odd and rng.random() < odd:
            drawn[letter] = odd_name(rng, taken)
            taken.add(drawn[letter])
            drawn[element] = next(name for name in ("item", "each", "one", "it") if name not in taken)
            taken.add(drawn[element])
            continue
        loops = f"${element}" in text
        own = {n: {n, singular(n)} if loops else {n} for n in kind.names.split()}
        name = rng.choice([n for n in own if not own[n] & taken])
        drawn[letter], drawn[element] = name, singular(name)
        taken |= own[name]
    return drawn


def draw_doc(rng: random.Random, family: Family, kinds: list[Kind], names: dict[str, str]) -> str:
    """Return the sentences of the docstring."""
    doc = rng.choice(family.docs)
    given = rng.random() < 0.2 and doc.startswith(("the ", "if "))
    phrases = {}
    for letter, kind in zip("abc", kinds, strict=False):
        options = [names[letter], f"the {kind.phrase} {names[letter]}", f"the given {kind.phrase}"]
        phrases[letter.upper()] = names[letter] if given else rng.choice(options)
    if given:
        article = "an" if kinds[0].phrase[0] in "aeiou" else "a"
        opener = "return" if doc.startswith("the ") else "check"
        doc = f"Given {article} {kinds[0].phrase} {names['a']}, {opener} {doc}"
    elif doc.startswith("the "):
        doc = f"{rng.choice(NOUN_OPENERS)} {doc}"
    elif doc.startswith("if "):
        doc = f"{rng.choice(TEST_OPENERS)} {doc[3:]}"
    if family.note and rng.random() < 0.5:
        doc = f"{doc.removesuffix('.')}. {family.note}"
    return fill(doc.removesuffix(".") + ".", {**names, **phrases})


def draw_examples(rng: random.Random, solution: str, name: str, kinds: list[Kind], most: int) -> list[tuple[str, str]]:
    """Draw up to `most` calls with their real results, unlike results first."""
    scope: dict[str, Any] = {}
    exec("from typing import Dict, List, Tuple\n" + solution, scope)  # noqa: S102 (our own template)
    quote = rng.choice("'\"")
    calls: dict[str, str] = {}
    for _ in range(6):
        values = [kind.sample(rng) for kind in kinds]
        shown = ", ".join(map(repr, values)).replace("'", quote)
        calls[f"{name}({shown})"] = repr(scope[name](*values))
    examples = list(calls.items())
    fresh = list({result: (call, result) for call, result in examples}.values())
    fresh += [example for example in examples if example not in fresh]
    return fresh[:most]


def typing_names(annotation: str) -> str:
    """Return the annotation with `List` for `list` and so on."""
    return re.sub(r"\b(list|dict|tuple)\[", lambda match: match[1].capitalize() + "[", annotation)


def python_task(rng: random.Random, odd: float = 0.0) -> tuple[str, str]:
    """Draw one task.

    Args:
        odd: Share of the names of functions and arguments that say nothing, so that they can only be copied.

    Returns:
        Stub and solution.
    """
    family = rng.choice(FAMILIES)
    kinds = [KINDS[kind] for kind in family.args.split()]
    names = draw_constants(rng, family)
    names.update(draw_arguments(rng, family, kinds, names, odd))
    name = fill(rng.choice(family.names.split()), names)
    if odd and rng.random() < odd:
        name = odd_name(rng, {*names.values(), *re.findall(r"[a-z_]+", family.body)})

    arguments = [names[letter] for letter, _ in zip("abc", kinds, strict=False)]
    signature = f"def {name}({', '.join(arguments)}):"
    imports = [family.imports] if family.imports else []
    if rng.random() < 0.6:
        typed = [f"{argument}: {kind.annotation}" for argument, kind in zip(arguments, kinds, strict=True)]
        signature = f"def {name}({', '.join(typed)}) -> {fill(family.returns, names)}:"
        if rng.random() < 0.5:
            signature = typing_names(signature)
            used = sorted(set(re.findall(r"\b(?:Dict|List|Tuple)(?=\[)", signature)))
            imports += [f"from typing import {', '.join(used)}"] if used else []

    body = fill(textwrap.dedent(family.body).strip("\n"), names)
    solution = signature + "\n" + textwrap.indent(body, "    ") + "\n"
    if family.imports:
        solution = f"{family.imports}\n\n\n{solution}"

    lines = textwrap.wrap(draw_doc(rng, family, kinds, names), rng.choice((72, 84, 96)))
    if rng.random() < 0.75:
        for call, result in draw_examples(rng, solution, name, kinds, rng.randint(1, 3)):
            lines += [f">>> {call}", result]
    lines = [f'"""{rng.choice(("", " "))}{lines[0]}', *lines[1:]] if rng.random() < 0.6 else ['"""', *lines]
    docstring = textwrap.indent("\n".join([*lines, '"""']), "    ")
    header = "".join(line + "\n" for line in imports) + "\n\n" if imports else ""
    return f"{header}{signature}\n{docstring}\n", solution


if __name__ == "__main__":
    generator = random.Random()
    for _ in range(10):
        print("\n----\n".join(python_task(generator)), end="\n====\n")
