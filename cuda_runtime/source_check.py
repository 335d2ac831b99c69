"""Checks a program's CUDA source: nothing in it may make the compiler read a file of this machine.

NVRTC follows `#include` of any path and shows lines of the file in its errors. Our generated sources include nothing,
and only the few directives that they do have are allowed. The check does not tell comments and strings from code:
after every `#` an allowed directive has to follow, and after every backslash an allowed escape. So nothing depends
on reading a source exactly as the compiler does.
"""

from __future__ import annotations

import re

from npu_compiler.errors import ProgramFormatError

_DIRECTIVES = r"(?:define|undef|if|ifdef|else|endif|error|pragma\ +unroll)\b"
# Joining two words could make any word; what ends in this one is harmless if it is no macro's parameter.
_JOINED = r"_body\b"

# Lines that end in a backslash are joined before the compiler looks for directives.
_CONTINUATION = re.compile(r"\\\n")
_REFUSED = re.compile(
    "|".join(
        [
            rf"(?<!\#)\#(?!\ *{_DIRECTIVES}|\#{_JOINED})",
            rf"(?<!\#\#)\b{_JOINED}",
            r"%:|\?\?",  # the other spellings of #
            r"\\(?!n)",  # escapes could spell anything
            r"__has_\w*|_Pragma|__pragma",
            r"\.(?:file|incbin|include)\b",  # PTX, in asm statements
            r"[^\n\t -~\x80-\U0010ffff]",  # other characters that a compiler may take for space or an end of line
        ]
    )
)


def check_source(name: str, text: str) -> None:
    """Refuse a source text that could make the compiler read files.

    Args:
        name: The name of the source, for the message.

    Raises:
        ProgramFormatError: the text has a directive or an escape that generated sources do not have.
    """
    joined = _CONTINUATION.sub("", text)
    refused = _REFUSED.search(joined)
    if refused is not None:
        words = re.match(r"\S*\s*\w*", joined[refused.start() :])
        assert words is not None
        raise ProgramFormatError(
            f"kernel source '{name}' has {words[0]!r}, which no generated source has: a program must not have the "
            "compiler read files"
        )
