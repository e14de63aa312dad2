"""`metainfer` and `python -m metainfer`."""

from metainfer.cli.app import app


def main() -> None:
    """Run the command line; leaves the process with its exit code."""
    app(prog_name="metainfer")


if __name__ == "__main__":
    main()
