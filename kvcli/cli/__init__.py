"""The command line: one file a command, wired by `app`. Everything below `kvcli` is usable without it."""
