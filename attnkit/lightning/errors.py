"""The error whose message is meant for the person at the command line."""


class UserError(Exception):
    """Something the user can put right: a wrong key, a missing folder, an unreadable file.

    The message stands for itself: it names the argument or path, what was given and what was
    expected, in at most three lines. The command line prints it without a traceback and exits
    with code 2; in a script it is an ordinary exception, with the cause chained.
    """
