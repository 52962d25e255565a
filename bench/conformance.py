"""`make conformance`: the public JSON Schema test suite against what structured output makes of its schemas.

A schema that is strict is held to what it says, or refused with a reason: an instance that is not valid must not be a
text of its grammar. One that is valid may be none where it is only written differently from how the grammar writes it.
Each is tried with the keys of its objects in every order, and with its characters written out or escaped. Where a
schema is not strict (`lenient`), keywords that cannot be enforced are left to the model.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":  # run as a script: the project's root is one up
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tailrace.terms import TailraceError
from tailrace.text import TokenBytes
from tailrace.text.grammar import Compiler, Grammar, GrammarError, Matcher, check

REQUIREMENT = "jsonschema==4.26.0"
"""Whose source distribution holds the suite; its results are known."""
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
"""Drafts, each with what a schema of it says in `$schema`."""
EOS = 256
"""The token beside the 256 bytes."""
ORDERS = 200
"""Most ways of writing an instance that are tried."""
SLOW = 2.0
"""Seconds of the processor that neither a schema nor an instance may take."""


@dataclass
class Found:
    """What was found in one draft. `wide`: instances that are not valid and yet texts of the grammar; `narrow`: those
    that are valid and no text of it; by file of the suite."""

    schemas: int = 0
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    right: int = 0
    wide: list[str] = field(default_factory=list)
    narrow: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)


def compiler() -> Compiler:
    """Grammars over single bytes."""
    table = TokenBytes.build([bytes([value]) for value in range(256)] + [b"<eos>"], [EOS])
    return Compiler(table, vocab=EOS + 1, eos_ids=(EOS,), encode=lambda text: list(text.encode()))


def orders(value: Any) -> Iterator[Any]:
    """The value with the keys of its objects in every order, as it stands first."""
    if isinstance(value, list):
        yield from map(list, itertools.product(*(tuple(orders(item)) for item in value)))
    elif isinstance(value, dict):
        for keys in itertools.permutations(value):
            for items in itertools.product(*(tuple(orders(value[key])) for key in keys)):
                yield dict(zip(keys, items, strict=True))
    else:
        yield value


def spellings(value: Any) -> Iterator[str]:
    """Ways of writing an instance, each once."""
    for order in itertools.islice(orders(value), ORDERS):
        plain = json.dumps(order, ensure_ascii=False)
        escaped = json.dumps(order)
        yield plain
        if escaped != plain:
            yield escaped


def is_text(matcher: Matcher, text: str) -> bool:
    """Whether it is a whole text of the grammar."""
    bits = np.zeros(matcher.words, np.uint32)
    try:
        for value in text.encode("utf-8", "surrogatepass"):
            if matcher.ended:
                return False
            matcher.take(value)
        if matcher.ended:
            return True
        matcher.fill(bits)
    except GrammarError:
        return False
    return bool(bits[EOS // 32] >> np.uint32(EOS % 32) & 1)


def judge(found: Found, grammars: Compiler, name: str, group: dict[str, Any], *, lenient: bool) -> None:
    """One schema and its instances."""
    found.schemas += 1
    begin = time.process_time()
    grammar = Grammar("json", json.dumps(group["schema"]), lenient)
    error = check(grammar) if isinstance(group["schema"], dict) else "a schema is an object"
    if not error:
        try:
            grammars.compile(grammar)
        except TailraceError as failure:
            error = str(failure)
    if error:
        found.refused[error.split(":")[0][:60]] += 1
    for test in [] if error else group["tests"]:
        holds = any(is_text(grammars.compile(grammar), text) for text in spellings(test["data"]))
        place = f"{name}: {group['description']}: {test['description']}"
        if holds == test["valid"]:
            found.right += 1
        else:
            (found.wide if holds else found.narrow).append(place)
    if time.process_time() - begin > SLOW * (1 + len(group["tests"])):
        found.slow.append(f"{name}: {group['description']}")


def run(folder: Path, draft: str, *, lenient: bool) -> Found:
    """All of one draft that is not optional."""
    found, grammars = Found(), compiler()
    for path in sorted((folder / draft).glob("*.json")):
        for group in json.loads(path.read_text()):
            if isinstance(group["schema"], dict):
                group["schema"].setdefault("$schema", DRAFTS[draft])
            judge(found, grammars, path.stem, group, lenient=lenient)
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", nargs="?", type=Path, help="of the unpacked source distribution")
    p.add_argument("--requirement", action="store_true", help="say which distribution that is")
    p.add_argument("--list", action="store_true", help="name each instance that differs")
    args = p.parse_args()
    if args.requirement:
        print(REQUIREMENT)
        return
    failed = False
    for draft, lenient in itertools.product(DRAFTS, (False, True)):
        found = run(args.folder / "json" / "tests", draft, lenient=lenient)
        kind = "lenient" if lenient else "strict"
        print(f"\n{draft}, {kind}: {found.schemas} schemas, {found.refused.total()} refused; the others' instances:")
        print("  ", end="")
        print(f"{found.right} as they should be, {len(found.narrow)} valid and not written, {len(found.wide)} invalid")
        for what, places in (("invalid and written", found.wide), ("valid and not written", found.narrow)):
            counts = collections.Counter(place.split(":")[0] for place in places)
            print(f"  {what}: {', '.join(f'{name} {count}' for name, count in counts.most_common())}")
            if args.list:
                print(*(f"    {place}" for place in places), sep="\n")
        print("  refused: " + "; ".join(f"{reason} ({count})" for reason, count in found.refused.most_common(12)))
        failed |= bool(found.slow) or not found.right or (bool(found.wide) and not lenient)
        print(*(f"  took too long: {place}" for place in found.slow), sep="\n", end="")
    sys.exit(failed)


if __name__ == "__main__":
    main()
