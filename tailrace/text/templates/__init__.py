"""Chat templates that a server can be given instead of its model's: by name, those of model families, or from a file.

Light at import: a command line is checked with `source_of` before anything else loads.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from tailrace.text.tokenizer import Text

TAGS = {
    "hermes": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("[INST]", "[/INST]"),
}
"""The templates that have names, with the tokens that a model must have for them."""
MOST_BYTES = 1 << 20
OPTION = "--chat-template"
_PROBE = [{"role": "user", "content": "Hello."}]


def source_of(given: str) -> str:
    """The template of that name, or in that file. Raises InvalidInput where there is neither, or no template in it."""
    if given in TAGS:
        return (Path(__file__).parent / f"{given}.jinja").read_text("utf-8")
    names = ", ".join(TAGS)
    path = Path(given)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise _wrong(f"{given} is not a file: give one, or one of {names}")
        if found.st_size > MOST_BYTES:
            raise _wrong(f"{given} has {found.st_size} bytes; a template has at most {MOST_BYTES}")
        source = path.read_text("utf-8")
    except FileNotFoundError:
        raise _wrong(f"{given!r} is neither a file nor one of {names}") from None
    except UnicodeDecodeError:
        raise _wrong(f"{given} is not UTF-8 text") from None
    except (OSError, ValueError) as error:  # a name that no file can have is a ValueError
        raise _wrong(f"{given} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not source.strip():
        raise _wrong(f"{given} is empty")
    if source.lstrip()[0] == "{" and source.lstrip()[:2] not in ("{%", "{{", "{#"):
        raise _wrong(f"{given} is no Jinja template but looks like JSON: give the text of its chat_template in a file")
    return source


def check(text: Text, given: str) -> None:
    """Raises InvalidInput unless the template lays out a message, in tokens that the model has."""
    tags = TAGS.get(given, ())
    missing = [tag for tag in tags if text.tag_id(tag) is None]
    if missing:
        raise _wrong(f"{given} is for models with the tokens {' '.join(tags)}, and this one has no {missing[0]}")
    try:
        text.warm()
        shown = text.render_chat(_PROBE, add_generation_prompt=True).text
    except InvalidInput as error:
        raise _wrong(f"{given} fails on a conversation of one message: {error}") from error
    if _PROBE[0]["content"] not in shown:
        raise _wrong(f"{given} does not show the model what the user says: it gives {shown[:80]!r}")


def _wrong(why: str) -> InvalidInput:
    return InvalidInput(f"{OPTION}: {why}", param="chat_template")
