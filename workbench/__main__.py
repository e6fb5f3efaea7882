"""`python -m workbench` is the command line."""

from workbench.cli import main

if __name__ == "__main__":
    main()
