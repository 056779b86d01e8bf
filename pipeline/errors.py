"""Errors a user can act on: one line each, an exit code of their own, no traceback.

0  done            2  configuration or usage     3  folder made with other settings
1  a fault of ours 4  unusable input or model    5  disk or memory without room
6  folder in use: again later
1 as well, in a line, where another process of the same training is gone (torchrun)
130 stopped by SIGINT (Ctrl-C)  143 stopped by SIGTERM: 128 and the signal's number, as shells have it

`versions` ends with 1 where something differs, `preflight` with 4 where a check failed,
`forecast` with 4 where something does not fit.
"""

import errno

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Numbers of an OSError that mean a full disk: told as SpaceError is, whatever was being written."""


class UserError(ValueError):
    """What is wrong, where, and what to do. `exit_code` is what the process ends with."""

    exit_code = 4


class ConfigError(UserError):
    """A configuration file, environment variable or flag that cannot be used."""

    exit_code = 2


class MismatchError(UserError):
    """A folder holds the output of other settings than this run's."""

    exit_code = 3


class InUseError(MismatchError):
    """A folder that another process is writing."""

    exit_code = 6


class InputError(UserError):
    """A file, folder or model that is missing, unreadable or unfit."""

    exit_code = 4


class SpaceError(UserError):
    """A disk without room for what is to be written, or memory for what is on its way there."""

    exit_code = 5


class LostError(UserError):
    """Another process of the same training, on another machine perhaps, has ended or cannot be reached."""

    exit_code = 1


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM has asked this process to end, and it has brought to an end what it had in hand."""

    def __init__(self, signal_number: int):
        super().__init__(signal_number)
        self.exit_code = 128 + signal_number
