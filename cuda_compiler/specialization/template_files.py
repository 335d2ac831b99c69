"""Reading template files, with their includes expanded and the text chosen that a call's parameters ask for."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from npu_compiler.errors import NPUError

_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_CHOICE = re.compile(r"^#where (\w+)\n(.*?)(?:^#elsewhere\n(.*?))?^#end\n", re.MULTILINE | re.DOTALL)


@cache
def template_text(file: str, parameters: frozenset[str] = frozenset()) -> str:
    """A file of `templates`, with the files that it includes in their places.

    The lines between `#where NAME` and `#end` are there if NAME is one of the call's `parameters`; those behind
    `#elsewhere` if it is not.
    """
    text = (files("cuda_compiler") / "templates" / file).read_text(encoding="utf-8")
    text = _CHOICE.sub(lambda match: match[2] if match[1] in parameters else match[3] or "", text)
    return _INCLUDE.sub(lambda match: template_text(match[1], parameters), text)


@cache
def kernel_text(file: str, function: str, parameters: frozenset[str] = frozenset()) -> str:
    """The text of one kernel of a template: everything before the first `#kernel` line, and the parts that name it.

    Args:
        parameters: Names of the call's parameters, as in `template_text`.

    Raises:
        NPUError: no part names it.
    """
    head, *parts = template_text(file, parameters).split("\n#kernel ")
    chosen = [rest for names, _, rest in (part.partition("\n") for part in parts) if function in names.split()]
    if parts and not chosen:
        raise NPUError(f"template '{file}' has no kernel '{function}'")
    return "\n".join([head, *chosen])
