"""`python -m worker` is agentctl."""

import sys

from worker import stepcli


def main() -> int:
    """Run the command line; what a step calls, perhaps in a loop, without the cost of the rest."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in stepcli.COMMANDS:
        return stepcli.main(arguments)
    from worker import cli

    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
