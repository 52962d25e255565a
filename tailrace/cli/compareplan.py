"""The command line of `tailrace compare`, made into who takes part. Wrong values are refused by the option's name."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tailrace.cli import output
from tailrace.deploy import engines
from tailrace.deploy.engines.driver import Driver, NotFound, Options
from tailrace.measure.engines.turns import Entrant
from tailrace.measure.result import Side
from tailrace.terms import InvalidInput, ModelError, TailraceError


@dataclass(frozen=True)
class Given:
    """What the options say of engines, by the name of an engine or of one configuration of it ("vllm:eager")."""

    paths: dict[str, str]
    arguments: dict[str, str]
    dtypes: dict[str, str]
    prices: dict[str, float]
    models: dict[str, str]
    every_model: list[str]

    def path(self, label: str) -> str | None:
        """Where the engine is, if that was said."""
        return _of(self.paths, label)


def labels(text: str) -> list[str]:
    """Of --engines: each an engine, or ENGINE:NAME for one configuration of it."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    for label in found:
        engines.driver(label.partition(":")[0])
    if len(set(found)) < len(found):
        twice = next(label for label in found if found.count(label) > 1)
        raise InvalidInput(f"{twice} takes part twice: call the second {twice}:NAME", param="engines")
    if not found:
        raise InvalidInput(f"--engines names none: {', '.join(engines.NAMES)}", param="engines")
    return found


def given(
    paths: Sequence[str], arguments: Sequence[str], dtypes: Sequence[str], prices: Sequence[str],
    models: Sequence[str], asked: Sequence[str],
) -> Given:  # fmt: skip
    """The options that are about one engine each. `asked` are those that take part."""
    own = {text.partition("=")[0]: text.partition("=")[2] for text in models if _named(text)}
    made = Given(
        _by_name(paths, "--engine-path", "vllm=/path/to/venv"),
        _by_name(arguments, "--engine-args", "vllm='--max-num-seqs 64'"),
        _by_name(dtypes, "--dtype", "tailrace=int8"), _prices(prices), own,
        [text for text in models if not _named(text)],
    )  # fmt: skip
    for flag, known in (("--engine-path", made.paths), ("--engine-args", made.arguments), ("--dtype", made.dtypes),
                        ("--price", made.prices)):  # fmt: skip
        for name in known:
            if name and name not in asked and name not in {label.partition(":")[0] for label in asked}:
                param = flag.removeprefix("--")
                raise InvalidInput(f"{flag} {name}=...: {name} does not take part ({', '.join(asked)})", param=param)
    return made


def _named(model: str) -> bool:
    name, equals, _ = model.partition("=")
    return bool(equals) and name.partition(":")[0] in engines.NAMES


def _by_name(texts: Sequence[str], flag: str, example: str) -> dict[str, str]:
    made = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not value or name.partition(":")[0] not in engines.NAMES:
            raise InvalidInput(f"{flag} is as in {example}, not {text!r}", param=flag.removeprefix("--"))
        made[name] = value
    return made


def _prices(texts: Sequence[str]) -> dict[str, float]:
    """Dollars an hour, of all under the name "", or of one."""
    made = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf or (name and name.partition(":")[0] not in engines.NAMES):
            raise InvalidInput(f"--price is dollars an hour, as in 0.8 or vllm=2.5, not {text!r}", param="price")
        made[name] = value
    return made


def _of(known: dict[str, str], label: str) -> str | None:
    return known.get(label, known.get(label.partition(":")[0]))


def model_for(driver: Driver, label: str, said: Given) -> str:
    """The model that this engine is to serve: its own, or the first of all that it takes. Raises InvalidInput."""
    own = _of(said.models, label)
    wanted = [own] if own is not None else said.every_model
    reasons = []
    for model in wanted:
        where = _resolved(model)
        reason = driver.unfit(where)
        if reason is None:
            return where
        reasons.append(reason)
    raise InvalidInput("; ".join(reasons) or f"no model was given that {driver.name} takes", param="model")


def _resolved(model: str) -> str:
    """A name of the catalogue as the file that it is (it is pulled if need be); else as it was typed."""
    path = Path(model).expanduser()
    if path.exists():
        return str(path.absolute())
    from tailrace.cli.serve import find_model
    from tailrace.models import catalogue

    try:
        catalogue.missing(model)
    except ModelError:
        return model  # it may be a name that an engine knows
    return str(find_model(model))


def entrant(label: str, said: Given, options: Options) -> Entrant | Side:
    """Who takes part under that label; where it cannot, why."""
    driver = engines.driver(label.partition(":")[0])
    try:
        found = driver.find(said.path(label))
        model = model_for(driver, label, said)
        arguments = _words(label, _of(said.arguments, label))
        made = Options(
            model, context=options.context, parallel=options.parallel, threads=options.threads,
            prefix_cache=options.prefix_cache, dtype=_of(said.dtypes, label), extra=arguments,
        )  # fmt: skip
        driver.command(found, made, 0)
    except TailraceError as error:
        return Side(label=label, engine=driver.name, absent=str(error))
    price = said.prices.get(label, said.prices.get(driver.name, said.prices.get("")))
    told = weights(model) + (f", as {made.dtype}" if made.dtype else "")
    return Entrant(label, driver, found, made, told, price)


def _words(label: str, text: str | None) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text or ""))
    except ValueError as error:
        raise InvalidInput(f"--engine-args of {label}: {error}", param="engine-args") from error


def weights(model: str) -> str:
    """What its weights are, in words: name, size, and what they are kept as, where a configuration says so."""
    path = Path(model)
    if path.is_file():
        return f"{path.name} ({output.size(path.stat().st_size)})"
    if not path.is_dir():
        return model
    files = [*path.glob("*.safetensors"), *path.glob("*.bin")]
    kept = ""
    try:
        config = json.loads((path / "config.json").read_text())
        kept = str(config.get("dtype") or config.get("torch_dtype") or "")
    except (OSError, ValueError, AttributeError):
        pass
    size = output.size(sum(file.stat().st_size for file in files))
    return f"{path.name} ({', '.join(filter(None, (size, kept)))})"


def listing(said: Given) -> list[tuple[str, str, str, str]]:
    """Every engine: its name, its version or nothing, where it is or why not, and which models it takes."""
    made = []
    for name in engines.NAMES:
        driver = engines.driver(name)
        try:
            found = driver.find(said.path(name))
            made.append((name, found.version, found.where, driver.formats))
        except NotFound as error:
            made.append((name, "", str(error).removeprefix(f"{name} ").removeprefix("is "), driver.formats))
    return made


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
