"""``python -m unicron_lightning.cli``: the command `unicron`, where its console script may not be on the path."""

from unicron_lightning.cli import main

if __name__ == "__main__":
    main()
