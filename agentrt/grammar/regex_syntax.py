"""Reads a regular expression into a small tree, and writes it back in a dialect that every engine understands alike.

Engines disagree about escapes, classes and anchors, and some accept nonsense such as ``foo**``. So a pattern is read
here first: what this parser accepts has one meaning, a set of strings without anchors, lookaround or backreferences;
what it does not accept is refused with its offset. It matches nothing itself.

Two dialects: "python" (`re` with ASCII classes, the whole text must match) and "ecma" (ECMA-262 with the u flag,
as JSON Schema's `pattern` wants it, found anywhere in the text).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Literal, NoReturn

import regex as regex_library

from agentrt.errors import GrammarError

Dialect = Literal["python", "ecma"]
Ranges = tuple[tuple[int, int], ...]

#: Copies of a character that a pattern may stand for once its repeats are written out; automata grow with it.
MAX_SIZE = 20_000
#: How deep groups may nest.
MAX_DEPTH = 150
#: The last code point but one: U+10FFFF, which is no character, marks ends (see `regex_worker`).
_LAST = 0x10FFFE


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of sorted, disjoint code point ranges."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Seq:
    """Its parts, one after the other; without parts, the empty string."""

    parts: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Alt:
    """One of its options; without options, nothing matches."""

    options: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Repeat:
    """`node`, `low` to `high` times; None is no limit."""

    node: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """The beginning ("^") or the end ("$") of the text."""

    side: Literal["^", "$"]


@dataclass(frozen=True, slots=True)
class Opaque:
    """What no automaton can hold: lookaround, a word boundary or a backreference, and a group that one may refer to.

    Attributes:
        before: How it begins in Python's notation, such as "(?=", "\\b" or "(".
        node: What it holds, if anything.
        offset: Where in the pattern it stands.
        group: Its number, if it is a capturing group.
    """

    before: str
    node: Node | None
    offset: int
    group: int = 0


Node = Chars | Seq | Alt | Repeat | Anchor | Opaque


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted and disjoint ranges of the same code points, without surrogates, which no text holds."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(piece for low, high in merged for piece in _without_surrogates(low, high))


def _without_surrogates(low: int, high: int) -> Iterator[tuple[int, int]]:
    if low <= min(high, 0xD7FF):
        yield low, min(high, 0xD7FF)
    if max(low, 0xE000) <= high:
        yield max(low, 0xE000), high


def complement(ranges: Ranges) -> Ranges:
    """Every other code point."""
    gaps, start = [], 0
    for low, high in ranges:
        if low > start:
            gaps.append((start, low - 1))
        start = high + 1
    return union([*gaps, *([(start, _LAST)] if start <= _LAST else [])])


def intersection(left: Ranges, right: Ranges) -> Ranges:
    """Code points in both."""
    return complement(union(complement(left) + complement(right)))


ANY_CHAR = Chars(union([(0, _LAST)]))
ANY_TEXT = Repeat(ANY_CHAR, 0, None)
EMPTY = Seq()
_DIGIT: Ranges = ((48, 57),)
_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: dict[str, Ranges] = {
    "python": ((9, 13), (32, 32)),
    "ecma": union([(9, 13), (32, 32), (160, 160), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]),
}
_NOT_DOT: dict[str, Ranges] = {"python": ((10, 10),), "ecma": ((10, 10), (13, 13), (0x2028, 0x2029))}
_CONTROL = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11}


_compile = lru_cache(maxsize=64)(regex_library.compile)


@lru_cache(maxsize=256)
def property_ranges(name: str) -> Ranges | None:
    """Code points of a Unicode property such as "L", "Lu" or "Script=Greek"; None if there is no such property."""
    try:
        pattern = regex_library.compile(rf"\p{{{name}}}+")
    except regex_library.error:
        return None
    everything = "".join(map(chr, range(_LAST + 1)))
    return union((m.start(), m.end() - 1) for m in pattern.finditer(everything))


def literal(text: str) -> Node:
    """Exactly `text`."""
    return Seq(tuple(Chars(((ord(c), ord(c)),)) for c in text))


def _fold(ranges: Ranges) -> Ranges:
    """Adds the other case of each character (simple folding; wide ranges are left alone beyond the first 3,000)."""
    extra = []
    for low, high in ranges:
        for code in range(low, min(high, low + 3000) + 1):
            char = chr(code)
            extra += [(ord(c), ord(c)) for c in (char.lower(), char.upper()) if len(c) == 1]
    return union([*ranges, *extra])


class _Parser:
    def __init__(self, pattern: str, dialect: Dialect, opaque: bool = False) -> None:
        self.opaque = opaque
        self.groups = 0
        self.names: dict[str, int] = {}
        self.pattern = pattern
        self.dialect: Dialect = dialect
        self.at = 0
        self.depth = 0
        self.ignore_case = False
        self.dot_all = False

    # ---- reading

    def peek(self) -> str:
        return self.pattern[self.at] if self.at < len(self.pattern) else ""

    def take(self, text: str) -> bool:
        if self.pattern.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def fail(self, what: str, keyword: str, at: int | None = None) -> NoReturn:
        offset = self.at if at is None else at
        near = self.pattern[max(0, offset - 10) : offset + 10]
        raise GrammarError(
            f"the pattern {self.pattern[:80]!r} cannot be used: {what} at offset {offset} (near {near!r})",
            pointer=str(offset),
            keyword=keyword,
        )

    # ---- grammar of patterns

    def parse(self) -> Node:
        node = self.alternation()
        if self.at < len(self.pattern):
            self.fail("an unopened parenthesis", ")")
        return node

    def alternation(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(f"groups nest deeper than {MAX_DEPTH}", "(")
        options = [self.sequence()]
        while self.take("|"):
            options.append(self.sequence())
        self.depth -= 1
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.peek() not in ("", "|", ")"):
            start = self.at
            atom = self.atom()
            parts.append(self.quantified(atom, start))
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def quantified(self, atom: Node, start: int) -> Node:
        bounds = self.bounds()
        if bounds is None:
            return atom
        if isinstance(atom, Anchor):
            self.fail("a repeated anchor", atom.side, start)
        self.take("?")  # lazy or greedy: the same set of strings
        if self.take("+"):
            self.fail("a possessive or doubled repeat", "+", self.at - 1)
        again = self.at
        if self.bounds() is not None:
            self.fail("a repeat of a repeat", self.pattern[again], again)
        low, high = bounds
        node = Repeat(atom, low, high)
        if size(node) > MAX_SIZE:
            self.fail(f"repeats that stand for {size(node):,} copies of a character (the limit is {MAX_SIZE:,})", "{", start)
        return node

    def bounds(self) -> tuple[int, int | None] | None:
        for sign, pair in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(sign):
                return pair
        if self.peek() != "{":
            return None
        match = _compile(r"\{(\d*)(,?)(\d*)\}").match(self.pattern, self.at)
        if match is None or not (match[1] or (match[3] and self.dialect == "python")):
            if self.dialect == "ecma":
                self.fail("a brace that is not a repeat", "{")
            return None
        low = int(match[1] or 0)
        high = (int(match[3]) if match[3] else None) if match[2] else low
        if high is not None and high < low:
            self.fail(f"a repeat from {low} to {high}", "{")
        self.at = match.end()
        return low, high

    def atom(self) -> Node:
        char = self.peek()
        if char == "(":
            return self.group()
        if char == "[":
            return self.char_class()
        if char == "\\":
            return self.escape()
        if char == "{" and self.dialect == "python":
            self.at += 1
            return self.chars(((123, 123),))
        if char in "*+?{":
            self.fail("a repeat of nothing", char)
        if self.dialect == "ecma" and char in "]}":
            self.fail("an unopened bracket", char)
        self.at += 1
        if char == "^":
            return Anchor("^")
        if char == "$":
            return Anchor("$")
        if char == ".":
            return ANY_CHAR if self.dot_all else Chars(complement(_NOT_DOT[self.dialect]))
        return self.chars(((ord(char), ord(char)),))

    def chars(self, ranges: Ranges) -> Chars:
        return Chars(_fold(ranges) if self.ignore_case else union(ranges))

    def group(self) -> Node:
        start = self.at
        self.at += 1
        look = next((sign for sign in ("?=", "?!", "?<=", "?<!") if self.take(sign)), None)
        if look is not None and not self.opaque:
            self.fail("lookaround, which no automaton can hold", f"({look}", start)
        flags = self.ignore_case, self.dot_all
        captures = look is None and not self.pattern.startswith("?", self.at)
        if look is None and self.take("?"):
            kind = self.group_kind(start)
            if kind is None:
                return EMPTY  # flags for the rest of the enclosing group
            captures = kind
        number = self.groups = self.groups + captures
        node = self.alternation()
        if not self.take(")"):
            self.fail("a parenthesis that is not closed", "(", start)
        self.ignore_case, self.dot_all = flags
        if look is not None:
            return Opaque(f"({look}", node, start)
        return Opaque("(", node, start, number) if captures and self.opaque else node

    def group_kind(self, start: int) -> bool | None:
        """Reads what follows "(?": whether the group captures, or None if that was all of it."""
        if self.take(":"):
            return False
        prefix = "P?" if self.dialect == "python" else ""
        named = _compile(prefix + r"<([A-Za-z_$][\w$]*)>").match(self.pattern, self.at)
        if named is not None:
            if named[1] in self.names:
                self.fail("a name that another group has", named[1], start)
            self.names[named[1]] = self.groups + 1
            self.at = named.end()
            return True
        flags = _compile(r"([is]+)([:)])").match(self.pattern, self.at)
        if flags is None or self.dialect == "ecma":
            self.fail("a kind of group that is not known", "(?", start)
        self.at = flags.end()
        self.ignore_case |= "i" in flags[1]
        self.dot_all |= "s" in flags[1]
        return False if flags[2] == ":" else None

    # ---- escapes and classes

    def escape(self) -> Node:
        start = self.at
        char = self.pattern[self.at + 1 : self.at + 2]
        if self.dialect == "python" and char in ("A", "Z"):
            self.at += 2
            return Anchor("^" if char == "A" else "$")
        if char and char in "bB123456789k":
            if not self.opaque:
                what = "a word boundary" if char in "bB" else "a backreference"
                self.fail(f"{what}, which no automaton can hold", "\\" + char)
            return self.beyond_automata(char, start)
        self.at += 1
        return self.chars(self.escaped(start))

    def beyond_automata(self, char: str, start: int) -> Node:
        """Reads a word boundary or a backreference."""
        match = _compile(r"\\(?:[bB]|k<([^>]+)>|([1-9][0-9]*))").match(self.pattern, self.at)
        if match is None:
            self.fail("an escape that is not known", "\\" + char, start)
        self.at = match.end()
        if char in "bB":
            return Opaque("\\" + char, None, start)
        number = self.names.get(match[1], 0) if match[1] else int(match[2])
        if not 0 < number <= self.groups:
            self.fail("a reference to a group that is not there", "\\" + char, start)
        return Opaque(f"(?:\\{number})", None, start)

    def escaped(self, start: int) -> Ranges:
        """Code points of the escape whose backslash was read."""
        if self.at >= len(self.pattern):
            self.fail("a backslash at the end", "\\", start)
        char = self.pattern[self.at]
        self.at += 1
        sets = {"d": _DIGIT, "w": _WORD, "s": _SPACE[self.dialect]}
        if char.lower() in sets:
            return sets[char] if char.islower() else complement(sets[char.lower()])
        if char in ("p", "P"):
            ranges = self.unicode_property(start)
            return ranges if char == "p" else complement(ranges)
        code = self.code_point(char, start)
        return ((code, code),)

    def unicode_property(self, start: int) -> Ranges:
        match = _compile(r"\{([A-Za-z0-9_=]+)\}").match(self.pattern, self.at)
        ranges = property_ranges(match[1]) if match else None
        if match is None or ranges is None:
            self.fail("a Unicode property that is not known", "\\p", start)
        self.at = match.end()
        return ranges

    def code_point(self, char: str, start: int) -> int:
        if char in _CONTROL:
            return _CONTROL[char]
        if char == "0" and not self.peek().isdigit():
            return 0
        if char == "a" and self.dialect == "python":
            return 7
        if char in "xuU":
            return self.hexadecimal(char, start)
        if char == "c" and self.dialect == "ecma" and self.peek().isascii() and self.peek().isalpha():
            self.at += 1
            return ord(self.pattern[self.at - 1]) % 32
        if char.isascii() and char.isalnum():
            self.fail("an escape that is not known", "\\" + char, start)
        return ord(char)

    def hexadecimal(self, char: str, start: int) -> int:
        digits = {"x": "{2}", "u": "{4}", "U": "{8}"}[char]
        match = _compile(rf"([0-9a-fA-F]{digits})|\{{([0-9a-fA-F]{{1,6}})\}}").match(self.pattern, self.at)
        if match is None:
            self.fail("an escape without its hexadecimal digits", "\\" + char, start)
        self.at = match.end()
        code = int(match[1] or match[2], 16)
        if 0xD800 <= code < 0xDC00:  # a pair of surrogates written as two escapes
            low = _compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self.pattern, self.at)
            if low is not None:
                self.at = low.end()
                return 0x10000 + ((code - 0xD800) << 10) + (int(low[1], 16) - 0xDC00)
        if code > _LAST:
            self.fail("an escape beyond U+10FFFE", "\\" + char, start)
        return code

    def char_class(self) -> Node:
        start = self.at
        self.at += 1
        negated = self.take("^")
        ranges: list[tuple[int, int]] = []
        first = self.dialect == "python"  # there, "[]a]" holds a bracket
        while first or self.peek() != "]":
            first = False
            if not self.peek():
                self.fail("a class that is not closed", "[", start)
            ranges += self.class_item()
        self.at += 1
        chars = self.chars(union(ranges))
        return Chars(complement(chars.ranges)) if negated else chars

    def class_item(self) -> Ranges:
        at = self.at
        low = self.class_atom()
        if not (self.peek() == "-" and self.pattern[self.at + 1 : self.at + 2] not in ("]", "")):
            return low
        self.at += 1
        high = self.class_atom()
        if not (len(low) == len(high) == 1 and low[0][0] == low[0][1] and high[0][0] == high[0][1]):
            self.fail("a range between things that are not single characters", "-", at)
        if low[0][0] > high[0][0]:
            self.fail("a range that runs backwards", "-", at)
        return ((low[0][0], high[0][0]),)

    def class_atom(self) -> Ranges:
        start = self.at
        char = self.peek()
        self.at += 1
        if char == "[" and self.pattern[self.at : self.at + 1] in (":", "=", "."):
            self.fail("a POSIX class", "[:", start)
        if char != "\\":
            return ((ord(char), ord(char)),)
        if self.peek() == "b":
            self.at += 1
            return ((8, 8),)
        return self.escaped(start)


def parse(pattern: str, dialect: Dialect = "python") -> Node:
    """Reads `pattern`.

    Raises:
        GrammarError: It is not a pattern, or asks for what an automaton cannot hold; `pointer` is the offset.
    """
    return _bounded(_Parser(pattern, dialect).parse())


def parse_any(pattern: str) -> Node:
    """Reads an ECMA pattern, with `Opaque` parts for what an automaton cannot hold; raises as `parse` does."""
    return _bounded(_Parser(pattern, "ecma", opaque=True).parse())


def _bounded(node: Node) -> Node:
    if size(node) > MAX_SIZE:
        raise GrammarError(
            f"the pattern stands for {size(node):,} copies of a character; the limit is {MAX_SIZE:,}", pointer="0", keyword="{"
        )
    return node


def children(node: Node) -> tuple[Node, ...]:
    """The trees directly under `node`."""
    match node:
        case Seq(parts):
            return parts
        case Alt(options):
            return options
        case Repeat(inner, _, _):
            return (inner,)
        case Opaque(_, Chars() | Seq() | Alt() | Repeat() | Anchor() | Opaque() as inner):
            return (inner,)
    return ()


def opaque_parts(node: Node) -> list[Opaque]:
    """Every lookaround, boundary and backreference in the tree; plain groups are not among them."""
    own = [node] if isinstance(node, Opaque) and not node.group else []
    return own + [part for child in children(node) for part in opaque_parts(child)]


def widened(node: Node) -> Node:
    """A tree that an automaton can hold and that matches at least what `node` does."""
    match node:
        case Opaque(_, inner, _, group):
            if group and inner is not None:
                return widened(inner)
            return ANY_TEXT if node.before.startswith("(?:") else EMPTY
        case Seq(parts):
            return Seq(tuple(map(widened, parts)))
        case Alt(options):
            return Alt(tuple(map(widened, options)))
        case Repeat(inner, low, high):
            return Repeat(widened(inner), low, high)
    return node


def size(node: Node) -> int:
    """Characters of the pattern with its repeats written out."""
    match node:
        case Chars():
            return 1
        case Repeat(inner, low, high):
            return max(1, size(inner)) * max(1, low + 1 if high is None else high)
    return sum(map(size, children(node)))


# ---- anchors


def whole(node: Node) -> Node:
    """The tree of the strings that `node` matches from beginning to end, without anchors.

    Raises:
        GrammarError: An anchor stands where it could not be taken away.
    """
    return _alternatives(core for _, core, _ in _variants(node))


def anywhere(node: Node) -> Node:
    """The tree of the strings in which `node` is found, without anchors; raises as `whole` does."""
    return _alternatives(
        Seq((*(() if left else (ANY_TEXT,)), core, *(() if right else (ANY_TEXT,)))) for left, core, right in _variants(node)
    )


def _alternatives(nodes: Iterable[Node]) -> Node:
    options = tuple(nodes)
    return options[0] if len(options) == 1 else Alt(options)


_Variant = tuple[bool, Node, bool]  #: held to the beginning, without anchors, held to the end


def _variants(node: Node) -> list[_Variant]:
    if not _has_anchor(node):
        return [(False, node, False)]
    match node:
        case Anchor(side):
            return [(side == "^", EMPTY, side == "$")]
        case Alt(options):
            return [variant for option in options for variant in _variants(option)]
        case Repeat(inner, 0, 1):
            return [(False, EMPTY, False), *_variants(inner)]
        case Repeat(inner, 1, 1):
            return _variants(inner)
        case Seq(parts):
            return reduce(_joined, map(_variants, parts), [(False, EMPTY, False)])
    raise GrammarError("an anchor inside a repeat cannot be held by an automaton", pointer="0", keyword="^")


def _joined(lefts: list[_Variant], rights: list[_Variant]) -> list[_Variant]:
    if len(lefts) * len(rights) > 256:
        raise GrammarError("too many ways in which the pattern's anchors combine (the limit is 256)", pointer="0", keyword="^")
    return [_join(left, right) for left in lefts for right in rights]


def _join(left: _Variant, right: _Variant) -> _Variant:
    """One after the other. Beyond an anchor only the empty string can stand, so what cannot be empty there never matches."""
    before = _emptied(left[1]) if right[0] else left[1]
    after = _emptied(right[1]) if left[2] else right[1]
    parts = [part for node in (before, after) for part in (node.parts if isinstance(node, Seq) else (node,))]
    return left[0] or right[0], parts[0] if len(parts) == 1 else Seq(tuple(parts)), left[2] or right[2]


def _emptied(node: Node) -> Node:
    return EMPTY if nullable(node) else Alt()


def nullable(node: Node) -> bool:
    """Whether the empty string matches."""
    match node:
        case Chars():
            return False
        case Seq(parts):
            return all(map(nullable, parts))
        case Alt(options):
            return any(map(nullable, options))
        case Repeat(inner, low, _):
            return low == 0 or nullable(inner)
        case Anchor() | Opaque():
            return True


def _has_anchor(node: Node) -> bool:
    return isinstance(node, Anchor) or any(map(_has_anchor, children(node)))


# ---- writing


def empty_language(node: Node) -> bool:
    """Whether nothing at all matches."""
    match node:
        case Chars(ranges):
            return not ranges
        case Seq(parts):
            return any(map(empty_language, parts))
        case Alt(options):
            return all(map(empty_language, options))
        case Repeat(inner, low, _):
            return low > 0 and empty_language(inner)
        case Anchor() | Opaque():
            return False


def write(node: Node) -> str:
    """Writes a tree: in a form that Rust's and Python's engines read alike, if it has no anchors and nothing opaque;
    in Python's otherwise.
    """
    return _write(node)


def _write(node: Node) -> str:
    match node:
        case Chars(ranges):
            return _write_class(ranges)
        case Seq(parts):
            return "".join(_write_group(p) if isinstance(p, Alt) else _write(p) for p in parts) or "(?:)"
        case Alt(options):
            return "|".join(_write(option) for option in options if not empty_language(option)) or _NOTHING
        case Repeat(inner, low, high):
            if empty_language(inner) or high == 0:
                return "(?:)"
            return _write_group(inner) + _write_bounds(low, high)
        case Anchor(side):
            return r"\A" if side == "^" else r"\Z"
        case Opaque(before, inner):
            return before if inner is None else f"{before}{_write(inner)})"


def _write_group(node: Node) -> str:
    text = _write(node)
    return text if isinstance(node, Chars) else f"(?:{text})"


def _write_bounds(low: int, high: int | None) -> str:
    simple = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high))
    return simple or (f"{{{low}}}" if low == high else f"{{{low},{'' if high is None else high}}}")


#: A class without members.
_NOTHING = r"[^\x00-\U0010ffff]"


def _write_class(ranges: Ranges) -> str:
    if not ranges:
        return _NOTHING
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _write_char(ranges[0][0])
    return "[" + "".join(_write_char(a) if a == b else f"{_write_char(a)}-{_write_char(b)}" for a, b in ranges) + "]"


def _write_char(code: int) -> str:
    char = chr(code)
    if (char.isascii() and char.isalnum()) or char in " _,:;<>=\"'%@!`":
        return char
    if code < 0x80:
        return f"\\x{code:02x}"
    if unicodedata.category(char)[0] in "LN" and code < 0x10000:
        return char
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
