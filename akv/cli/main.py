"""Entry point of the command `akv`: options in, exit status out. What a command does stands in a module of its own."""

import sys
from typing import TYPE_CHECKING

from akv.errors import AkvError, DependencyError

if TYPE_CHECKING:
    import typer

#: Exit status of a run that could not be made: wrong options, a missing package, a pool that does not start.
UNUSABLE = 2


def main() -> None:
    """Run the command line; never returns. Status 0: done. 1: a difference, or trouble found. 2: it could not be run."""
    try:
        build_app()()
    except AkvError as error:
        print(f"akv: {error}", file=sys.stderr)
        sys.exit(UNUSABLE)


def build_app() -> "typer.Typer":
    """The command line. Raises DependencyError if the packages of the extra `cli` are missing."""
    try:
        import typer  # noqa: PLC0415 - an optional package, needed by whoever runs the command and not by `import akv`
    except ImportError as error:
        raise DependencyError(f"the command line needs the packages of its extra: pip install 'akv[cli]' ({error})") from error
    from akv.cli.bench.command import add_bench  # noqa: PLC0415
    from akv.cli.config.command import add_config  # noqa: PLC0415
    from akv.cli.demo.command import add_demo  # noqa: PLC0415
    from akv.cli.doctor.command import add_doctor  # noqa: PLC0415
    from akv.cli.stat.command import add_stat  # noqa: PLC0415

    app = typer.Typer(
        name="akv",
        help="Share the KV cache of LLM servers through a Mooncake pool.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def _root() -> None:
        # A callback makes typer keep the command's name also while there is only one.
        """Share the KV cache of LLM servers through a Mooncake pool."""

    add_bench(app)
    add_config(app)
    add_demo(app)
    add_doctor(app)
    add_stat(app)
    return app


if __name__ == "__main__":
    main()
