"""`python -m ops` is `downcore`."""

from ops.cli.main import main

if __name__ == "__main__":
    main()
