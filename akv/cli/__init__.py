"""The command `akv`. Each command imports what it needs when it runs, so that the others work without it."""
