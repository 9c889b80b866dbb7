"""``python -m ostinato`` is ``ostinato``."""

from .cli import main

if __name__ == "__main__":
    main()
