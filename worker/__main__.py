"""`python -m worker` is agentctl."""

import sys

from worker import startup, stepcli


def main() -> int:
    """Run the command line; return the exit status."""
    startup.prepare()
    try:
        status = _run(sys.argv[1:])
    except startup.OutputFailed as exc:
        return startup.output_failed(exc)
    except SystemExit as exc:  # argparse's, after --help or a mistake
        return startup.finish(exc.code if isinstance(exc.code, int) else 0)
    except BaseException:
        startup.finish(1)
        raise
    return startup.finish(status)


def _run(arguments: list[str]) -> int:
    """Run a command; what a step calls, perhaps in a loop, without the cost of the rest."""
    if arguments and arguments[0] in stepcli.COMMANDS:
        return stepcli.main(arguments)
    from worker import cli

    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
