"""What can go wrong, as types. `kvcli.cli.errors` turns them into exit codes; nothing here knows the terminal.

Every message is one line: what is wrong, and what to do about it.
"""


class KvcliError(Exception):
    """Base of every error that a user can cause or cure."""


class UsageError(KvcliError):
    """A flag, a setting, a budget or an input list that makes no sense (exit 2)."""


class StartError(KvcliError):
    """The run could not start: model, device, disk (exit 1)."""


class PictureError(KvcliError):
    """One picture can't be read or described; its neighbours go on (a record with an error)."""
