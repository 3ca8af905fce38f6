"""`python -m minipaged` is the `minipaged` command."""

from minipaged.cli import main

if __name__ == "__main__":
    main()
