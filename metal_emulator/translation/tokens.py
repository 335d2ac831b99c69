"""Tokens of Metal source, and methods to find related tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

INTEGER_WORDS = ("unsigned", "signed", "int", "char", "short", "long")
ASSIGNMENTS = ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")
KEYWORDS = ("return", "if", "while", "for", "switch", "else", "case", "do", "sizeof")

_TOKEN = re.compile(
    r"""(?P<space>(?:\s+|(?:(?<=\n)|\A)\#[^\n]*)+)
      | (?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
      | (?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<op><<=|>>=|\.\.\.|->|::|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|.)""",
    re.VERBOSE,
)
_MARKER = re.compile(r'#(?:line)?\s+(\d+)(?:\s+"([^"]*)")?')


class TranslationError(Exception):
    """An error for source that the emulator does not support; the message starts with file and line."""


@dataclass(eq=False)
class Token:
    """A token: its text in the source, and the text that is written in its place."""

    kind: str
    text: str
    before: str
    file: str
    line: int
    output: str
    prefix: str = ""
    suffix: str = ""
    partner: int = -1
    in_attribute: bool = False
    is_scalar: bool = False  # names a threadgroup variable that is no array

    def emit(self) -> str:
        return f"{self.before}{self.prefix}{self.output}{self.suffix}"

    def wrap(self, last: Token, opening: str, closing: str) -> None:
        """Put text around the tokens from this one to `last`, outside of text that an earlier call put there."""
        self.prefix = opening + self.prefix
        last.suffix += closing


def tokenize(text: str, file: str = "program_source") -> tuple[list[Token], str]:
    """The tokens of preprocessed text, each with the white space and line markers before it.

    They are followed by the text after the last token.
    """
    tokens: list[Token] = []
    before, line, position = "", 1, 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        assert match is not None  # the last alternative takes any character
        position = match.end()
        piece, kind = match.group(), match.lastgroup or "op"
        if kind == "space":
            before += piece
            for row in piece.splitlines(keepends=True):
                marker = _MARKER.match(row)
                if marker:
                    line, file = int(marker.group(1)), marker.group(2) or file
                elif row.endswith("\n"):
                    line += 1
            continue
        tokens.append(Token(kind, piece, before, file, line, piece))
        before = ""
    opened: list[int] = []
    for index, token in enumerate(tokens):
        if token.kind == "op" and token.text in "([{":
            opened.append(index)
        elif token.kind == "op" and token.text in ")]}":
            if not opened:
                raise TranslationError(f"{token.file}:{token.line}: unmatched '{token.text}'")
            token.partner = opened.pop()
            tokens[token.partner].partner = index
    if opened:
        token = tokens[opened[-1]]
        raise TranslationError(f"{token.file}:{token.line}: unmatched '{token.text}'")
    return tokens, before


class Source:
    """The tokens of preprocessed source, which the passes rewrite in place."""

    def __init__(self, text: str) -> None:
        self.tokens, self.rest = tokenize(text)

    def emit(self) -> str:
        """The rewritten source."""
        return "".join(token.emit() for token in self.tokens) + self.rest

    def error(self, index: int, message: str) -> TranslationError:
        """An error that names the file and line of a token, for the caller to raise."""
        token = self.tokens[min(index, len(self.tokens) - 1)]
        return TranslationError(f"{token.file}:{token.line}: error: {message}")

    def text(self, index: int) -> str:
        """The text of the token at `index`; "" outside the source."""
        return self.tokens[index].text if 0 <= index < len(self.tokens) else ""

    def is_name(self, index: int) -> bool:
        return 0 <= index < len(self.tokens) and self.tokens[index].kind == "name"

    def joined(self, start: int, end: int) -> str:
        """The rewritten text of the tokens [start, end), on one line."""
        return " ".join(f"{token.prefix}{token.output}{token.suffix}" for token in self.tokens[start:end]).strip()

    def original(self, start: int, end: int) -> str:
        """The original text of the tokens [start, end), on one line."""
        first, *others = self.tokens[start:end]
        return first.text + "".join((" " if token.before else "") + token.text for token in others)

    def blank(self, start: int, end: int, replacement: str = "") -> None:
        """Write `replacement` in place of the tokens [start, end), without a change of line numbers."""
        for token in self.tokens[start:end]:
            token.output = ""
        self.tokens[start].output = replacement

    def closing_angle(self, index: int) -> int:
        """The index of the token that closes the template bracket at `index`.

        `index` itself if `<` is no bracket there.
        """
        depth, at = 0, index
        while at < len(self.tokens):
            text = self.text(at)
            if text == "<":
                depth += 1
            elif text in (">", ">>"):
                depth -= len(text)
                if depth <= 0:
                    return at
            elif text in ("(", "[") and self.tokens[at].partner > at:
                at = self.tokens[at].partner
            elif text in (";", "{", "}", "&&", "||"):
                return index
            at += 1
        return index

    def parse_type(self, index: int) -> tuple[str, bool, int]:
        """The type that starts at `index`: its text without const, whether it is const, and the index after it."""
        words: list[str] = []
        is_const = False
        while True:
            text = self.text(index)
            if text in ("const", "volatile", "constexpr", "static"):
                is_const = is_const or text == "const"
                index += 1
            elif text in ("struct", "typename") or (text in INTEGER_WORDS and all(w in INTEGER_WORDS for w in words)):
                words.append(text)
                index += 1
            elif self.is_name(index) and (not words or words[-1] in ("struct", "typename", "::")):
                words.append(text)
                index += 1
                if self.text(index) == "<":
                    end = self.closing_angle(index)
                    words.append(self.original(index, end + 1))
                    index = end + 1
            elif text == "::":
                words.append(text)
                index += 1
            else:
                return " ".join(words), is_const, index

    def after_dimensions(self, index: int) -> int:
        """The index after the array dimensions `[…]` that start at `index`."""
        while self.text(index) == "[" and not self.tokens[index].in_attribute:
            index = self.tokens[index].partner + 1
        return index

    def scope_end(self, index: int) -> int:
        """The index of the brace that closes the innermost block around `index`."""
        while index < len(self.tokens) and not (self.text(index) == "}" and self.tokens[index].partner < index):
            index = self.tokens[index].partner + 1 if self.text(index) in ("(", "[", "{") else index + 1
        return index

    def is_prefix(self, index: int) -> bool:
        """Whether the operator at `index` is a prefix operator: there is no operand on its left."""
        previous = self.tokens[index - 1] if index else None
        if previous is None or previous.text in ("return", "else", "case"):
            return True
        return previous.kind == "op" and previous.text not in (")", "]", "}", ">", "++", "--")

    def is_keyword(self, index: int) -> bool:
        return self.text(index) in KEYWORDS

    def postfix_end(self, index: int) -> int:
        """The index after the postfix expression that starts at `index`; `index` if none starts there."""
        if not self.is_name(index) and self.text(index) != "(":
            return index
        index = index + 1 if self.is_name(index) else self.tokens[index].partner + 1
        while True:
            text = self.text(index)
            if text in (".", "->", "::") and self.is_name(index + 1):
                index += 2
            elif text in ("[", "("):
                index = self.tokens[index].partner + 1
            else:
                return index

    def postfix_start(self, end: int) -> int:
        """The index at which the postfix expression that ends before `end` starts."""
        index = end - 1
        while True:
            text = self.text(index)
            if text in (")", "]"):
                index = self.tokens[index].partner
                # A name before the bracket is called or subscripted, as is what another bracket closes.
                if self.text(index - 1) in (")", "]") or (self.is_name(index - 1) and not self.is_keyword(index - 1)):
                    index -= 1
                    continue
                return index
            if self.is_name(index) and self.text(index - 1) in (".", "->", "::"):
                index -= 2
                continue
            return index

    def statement_start(self, index: int) -> int:
        """The index at which the left-hand side of the assignment at `index` starts."""
        at = index - 1
        while at >= 0:
            text = self.text(at)
            if text in (")", "]"):
                opening = self.tokens[at].partner
                if text == ")" and self.text(opening - 1) in ("if", "while", "for", "switch"):
                    return at + 1
                at = opening - 1
                continue
            if text in (";", "{", "}", "(", "[", ",", ":", "?", "else", "do") or text in ASSIGNMENTS:
                return at + 1
            at -= 1
        return 0

    def condition_start(self, index: int) -> int:
        """The index at which the condition of the `?` at `index` starts."""
        at = index - 1
        while at >= 0:
            text = self.text(at)
            if text in (")", "]"):
                at = self.tokens[at].partner - 1
                continue
            if text in (";", "{", "}", "(", "[", ",", ":", "?", "return") or text in ASSIGNMENTS:
                break
            at -= 1
        return at + 1
