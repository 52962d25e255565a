"""The entry point `tailrace`.

Starting fast is a feature. A plain, valid `tailrace serve ...` is parsed here without typer and rich (importing them
takes longer than starting a process does), and the engine process starts before anything else is loaded. Whatever is
not plainly valid (help, completion, mistakes) goes to the full command line, which explains itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits: 0 done, 1 failed, 2 wrong use, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.exit(_run(given))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        from tailrace.terms import InvalidInput, TailraceError

        if not isinstance(error, TailraceError):
            raise
        from tailrace.cli import output

        output.error(str(error))
        sys.exit(2 if isinstance(error, InvalidInput) else 1)


def _run(given: list[str]) -> int:
    if given[:1] == ["serve"] and "_TAILRACE_COMPLETE" not in os.environ:
        if any(word.startswith("--api-key") for word in given):
            from tailrace.cli import arguments

            arguments.hide("--api-key")  # before the engine is forked, which would show it as well
        from tailrace.cli import options

        values = options.parse(given[1:], options.SERVE)
        if values is not None:
            import gc

            gc.disable()  # until start-up is over (`api.server`): nothing that imports make is garbage
            from tailrace.engine import early

            engine = early.fork(blas=values["backend"] == "reference")
            from tailrace.cli import serve

            return serve.run(values, engine)
    if given == ["--version"]:
        from tailrace import __version__

        print(f"tailrace {__version__}")
        return 0
    from tailrace.cli.app import run

    return run(given)


if __name__ == "__main__":
    main()
