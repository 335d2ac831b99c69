"""Reading template files, with their includes expanded."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from npu_compiler.errors import NPUError

_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


@cache
def template_text(file: str) -> str:
    """A file of `templates`, with the files that it includes in their places."""
    text = (files("cuda_compiler") / "templates" / file).read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda match: template_text(match[1]), text)


@cache
def kernel_text(file: str, function: str) -> str:
    """The text of one kernel of a template: everything before the first `#kernel` line, and the parts that name it.

    Raises:
        NPUError: no part names it.
    """
    head, *parts = template_text(file).split("\n#kernel ")
    chosen = [rest for names, _, rest in (part.partition("\n") for part in parts) if function in names.split()]
    if parts and not chosen:
        raise NPUError(f"template '{file}' has no kernel '{function}'")
    return "\n".join([head, *chosen])
