"""``python -m unicron_lightning.cli``: the command `unicron`, for systems without its console script on the path."""

from unicron_lightning.cli import main

if __name__ == "__main__":
    main()
